"""Checks a caller's values by type and range, and converts them to Python's int, float, bool, str, list and dict.

A type describes them fully: `Annotated[int, Meta(ge=1, description="an integer >= 1")]`. msgspec converts to it
strictly: no bool is a number, no text is one, an int may be a float.
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The least positive and the largest number that the device can compute with."""

AtLeast1 = Annotated[int, Meta(ge=1, le=2**63 - 1, description="an integer >= 1, below 2**63")]
Size = Annotated[int, Meta(ge=1, lt=2**30, description="an integer >= 1, below 2**30")]
SizeOrZero = Annotated[int, Meta(ge=0, lt=2**30, description="an integer >= 0, below 2**30")]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1, description="an integer >= 0, below 2**63")]
Finite = Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX, description="a finite number")]
NotNegative = Annotated[float, Meta(ge=0, le=FLOAT32_MAX, description="a finite number >= 0")]
Seed = Annotated[int, Meta(ge=0, lt=2**32, description="an integer in [0, 2**32)")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number in [0, 1]")]
Positive = Annotated[float, Meta(ge=FLOAT32_MIN, le=FLOAT32_MAX, description="a finite number > 0")]

_DESCRIPTIONS = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}
_SCALARS = (int, float, bool, str, type(None))
_BYTES = (bytes, bytearray, memoryview)
_SHOWN = 80  # characters of a value in an error


def check_fields(owner: object, *names: str, where: str | None = None, error: type[ValueError] = ValueError) -> None:
    """Convert fields of a frozen dataclass to their annotated types; the caller's values are copied.

    Args:
      names: the fields; none: all but those of type Any.
      where: what errors name before the field; None: the class.
      error: the type of errors, which name the field.
    """
    annotations, where = _annotations(type(owner)), where or type(owner).__name__
    for name in names or annotations:
        value = check(f"{where}.{name}", getattr(owner, name), annotations[name], error=error)
        object.__setattr__(owner, name, value)


def check(name: str, value: object, kind: Any, *, error: type[ValueError] = ValueError) -> Any:
    """Convert a value to a type; the caller's values are copied. Raises an error of this type that names it."""
    try:
        return msgspec.convert(plain(value), kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: an integer of thousands of digits
        raise error(f"{name} must be {_description(kind)}, got {shown(value)}.") from None


def plain(value: Any) -> Any:
    """Copy a value to JSON's types: arrays and numbers as Python's, str subclasses as str; anything else as it is.

    Raises ValueError for a set, which has no order; RecursionError for values that are too deep, or hold themselves.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, _BYTES):
        return [item if type(item) in _SCALARS else plain(item) for item in value]
    if isinstance(value, Set):
        raise ValueError("a set has no order")
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


def shown(value: object) -> str:
    """Show a value in an error message, cut if it is long."""
    try:
        text = repr(value)
    except Exception:  # from an integer of thousands of digits, or a class that is not ours
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@functools.cache
def _annotations(owner: Any) -> dict[str, Any]:
    hints = get_type_hints(owner, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner) if hints[field.name] is not Any}


def _description(kind: Any) -> str:
    """Describe a type in words: by the last of its descriptions, or by its parts."""
    described = [meta.description for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Meta)]
    if any(described):
        return next(text for text in reversed(described) if text)
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(repr(member.value) for member in kind)
    if get_origin(kind) in (list, tuple):
        return f"a list, of which each is {_description(get_args(kind)[0])}"
    if type(None) in get_args(kind):
        return f"{' or '.join(_description(part) for part in get_args(kind) if part is not type(None))} or None"
    return _DESCRIPTIONS.get(kind, getattr(kind, "__name__", str(kind)))
