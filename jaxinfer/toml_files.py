"""Reads TOML files of users: errors name the file and the line or the field."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec


@contextlib.contextmanager
def reading_toml(path: str | os.PathLike[str], what: str, error: type[ValueError] = ValueError) -> Iterator[Any]:
    """Decode a TOML file for the block that reads it.

    Args:
      what: what the file describes, such as "a system".
      error: the type of errors.

    Raises an error of this type, with the file's name, for a file that cannot be read, and for each ValueError,
    TypeError and msgspec.ValidationError of the block.
    """
    path = pathlib.Path(path)
    try:
        yield msgspec.toml.decode(path.read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"{path}: {reason.strerror}; name a TOML file that describes {what}.") from reason
    except msgspec.ValidationError as reason:
        raise error(f"{path}: {reason}") from reason
    except msgspec.DecodeError as reason:
        line = re.search(r"line (\d+)", str(reason))
        raise error(f"{path}:{line[1] if line else _last_line(path)}: not TOML: {reason}.") from reason
    except (UnicodeDecodeError, ValueError, TypeError) as reason:
        raise error(f"{path}: {reason}") from reason


def check_table(where: str, table: object, known: Iterable[str], error: type[ValueError] = ValueError) -> None:
    """Raise an error of this type if a table has a field that is not known. where: the table, for the error."""
    known = tuple(known)
    if isinstance(table, dict) and (unknown := [name for name in table if name not in known]):
        raise error(f"{where}: unknown field {', '.join(map(repr, unknown))}; known: {', '.join(known)}.")


def _last_line(path: pathlib.Path) -> int:
    return len(path.read_bytes().splitlines())
