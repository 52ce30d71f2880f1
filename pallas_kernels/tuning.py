"""Tile sizes measured on a device: JSON tables, one a device kind, which `benchmarks.gpu` writes.

A table is {operation: {key: {field: value}}}. Each operation has a frozen dataclass of tile sizes, a key that names the
shapes it was tuned for, and a heuristic for what no table has.
"""

import contextlib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable

import jax

from pallas_kernels.dispatch import device_kind

_trial = jax.make_user_context(None)


def tuned(operation: str, key: str) -> Mapping[str, int] | None:
    """The tile sizes measured for this operation and key on the device that is traced for; None if there are none."""
    if _trial.value is not None:
        return _trial.value.answer(operation, key)
    return _table(table_name(device_kind())).get(operation, {}).get(key)


class Trial:
    """Stands in for the tables: answers one operation with some tile sizes, others with none, and notes who asks.

    Attributes:
      asked: (operation, key) of every question, in order.
    """

    def __init__(self, operation: str | None = None, tiles: Mapping[str, int] | None = None):
        self._operation, self._tiles = operation, tiles
        self.asked: list[tuple[str, str]] = []

    def answer(self, operation: str, key: str) -> Mapping[str, int] | None:
        """What `tuned` says while this trial runs."""
        self.asked.append((operation, key))
        return self._tiles if operation == self._operation else None

    def running(self) -> contextlib.AbstractContextManager[None]:
        """For programs that are traced within; none of what was traced outside is reused."""
        return _trial(self)


def table_name(kind: str) -> str:
    """The file name of a device kind's table: "NVIDIA H200" -> "nvidia_h200.json"."""
    return kind.lower().replace(" ", "_").replace("/", "_") + ".json"


def tables() -> Traversable:
    """The folder of the tables that come with the package."""
    return resources.files("pallas_kernels") / "tuned"


@functools.cache
def _table(name: str) -> dict[str, dict[str, dict[str, int]]]:
    file = tables() / name
    return json.loads(file.read_text()) if file.is_file() else {}
