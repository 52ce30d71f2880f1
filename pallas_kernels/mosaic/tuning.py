"""Autotuned tile sizes: JSON tables, one per device kind, written by `benchmarks.gpu`.

A table is {operation: {key: {field: value}}}. Each operation has a frozen dataclass of tile sizes, a key that describes
the shapes they were tuned for, and a heuristic for shapes that are not in the table.
"""

import contextlib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable

import jax

from jaxinfer.pallas_kernels.target import target_gpu

_trial = jax.make_user_context(None)


def tuned(operation: str, key: str) -> Mapping[str, int] | None:
    """The tuned tile sizes of this operation and key on the device that is traced for, or None."""
    if _trial.value is not None:
        return _trial.value.lookup(operation, key)
    return _table(table_name(target_gpu().name)).get(operation, {}).get(key)


class Trial:
    """Replaces the tables: gives one operation the tile sizes under test and all others none, and records lookups.

    Attributes:
      lookups: (operation, key) of every lookup, in order.
    """

    def __init__(self, operation: str | None = None, tiles: Mapping[str, int] | None = None):
        self._operation, self._tiles = operation, tiles
        self.lookups: list[tuple[str, str]] = []

    def lookup(self, operation: str, key: str) -> Mapping[str, int] | None:
        """Return what `tuned` does while this trial is active."""
        self.lookups.append((operation, key))
        return self._tiles if operation == self._operation else None

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Apply to programs traced inside; jaxprs cached outside are not reused."""
        return _trial(self)


def table_name(kind: str) -> str:
    """The file name of a device kind's table: "NVIDIA H200" -> "nvidia_h200.json"."""
    return kind.lower().replace(" ", "_").replace("/", "_") + ".json"


def tables() -> Traversable:
    """The folder of the tables shipped with the package."""
    return resources.files("jaxinfer.pallas_kernels") / "tuned"


@functools.cache
def _table(name: str) -> dict[str, dict[str, dict[str, int]]]:
    """A table by its file name; empty if there is none."""
    file = tables() / name
    return json.loads(file.read_text()) if file.is_file() else {}
