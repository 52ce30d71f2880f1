"""Tile sizes measured on a device: JSON tables, one a device kind, which `benchmarks.gpu` writes.

A table is {operation: {key: {field: value}}}. Each operation has a frozen dataclass of tile sizes, a key that names the
shapes it was tuned for, and a heuristic for what no table has.
"""

import functools
import json
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable

from pallas_kernels.dispatch import device_kind


def tuned(operation: str, key: str) -> Mapping[str, int] | None:
    """The tile sizes measured for this operation and key on the device that is traced for; None if there are none."""
    return _table(table_name(device_kind())).get(operation, {}).get(key)


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
