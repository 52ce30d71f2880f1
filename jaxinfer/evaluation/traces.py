"""Traces on disk, in one format for all: a JSON object a line, with the fields of its class by name.

Inputs of experts are `TraceRequest`s, queries of elastic services are `Query`s. Recorded runs have a header before such
lines.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from jaxinfer.disk_cache.files import write_atomically


class Arriving(Protocol):
    """An item of a trace: a dataclass with `arrival`, in seconds from the start."""

    @property
    def arrival(self) -> float: ...


def write_trace(file: str | os.PathLike[str], items: Iterable[Arriving]) -> None:
    """Write items in the order of their arrival."""
    ordered = sorted(items, key=lambda item: item.arrival)
    write_lines(file, ordered)


def read_trace[T: Arriving](file: str | os.PathLike[str], kind: type[T], *, name: str) -> list[T]:
    """Read a file of `write_trace`.

    Args:
      kind: the class of the items.
      name: an item's name in errors, such as "a query".

    Raises ValueError that names file and line, also for a file that cannot be read.
    """
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; name a trace, one JSON object a line.") from error
    items = read_lines(file, lines, kind, name=name)
    for number, (before, item) in enumerate(itertools.pairwise(items), 2):
        if item.arrival < before.arrival:
            raise ValueError(f"{file}:{number}: arrives before the line above does; sort the lines.")
    return items


def write_lines(file: str | os.PathLike[str], values: Iterable[object]) -> None:
    """Write values, each as a line of JSON: the whole file, or nothing."""
    write_atomically(Path(file), *(msgspec.json.encode(value) + b"\n" for value in values))


def read_lines[T](
    file: str | os.PathLike[str], lines: Sequence[bytes], kind: type[T], *, name: str, first: int = 1
) -> list[T]:
    """Parse the values in lines of a file.

    Args:
      file: the lines' file.
      kind: a dataclass.
      name: a value's name in errors.
      first: number of the first line.

    Raises ValueError that names file and line.
    """
    return [_read_line(line, kind, f"{file}:{number}: not {name}") for number, line in enumerate(lines, first)]


def _read_line[T](line: bytes, kind: type[T], problem: str) -> T:
    try:
        value = msgspec.json.decode(line)
        _check_fields(value, kind)
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{problem} ({error}); write the file again.") from error


def _check_fields(value: Any, kind: Any) -> None:
    """Check that the class has a line's fields. Raises ValueError that names the known ones."""
    known = [field.name for field in dataclasses.fields(kind)]
    if isinstance(value, dict) and (unknown := value.keys() - set(known)):
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
