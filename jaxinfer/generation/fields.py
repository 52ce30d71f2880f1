"""Checks a caller's values by type and range, and converts them to Python's int, float, bool, str, list and dict.

A type describes them fully: `Annotated[int, Meta(ge=1, description="an integer >= 1")]`. msgspec converts to it
strictly: no bool is a number, no text is one, an int may be a float.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The least positive and the largest number that the device can compute with."""

AtLeast1 = Annotated[int, Meta(ge=1, le=2**63 - 1, description="an integer >= 1, below 2**63")]
Size = Annotated[int, Meta(ge=1, lt=2**30, description="an integer >= 1, below 2**30")]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1, description="an integer >= 0, below 2**63")]
Finite = Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX, description="a finite number")]
NotNegative = Annotated[float, Meta(ge=0, le=FLOAT32_MAX, description="a finite number >= 0")]
Positive = Annotated[float, Meta(ge=FLOAT32_MIN, le=FLOAT32_MAX, description="a finite number > 0")]

_DESCRIPTIONS = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}
_SCALARS = (int, float, bool, str, type(None))
_BYTES = (bytes, bytearray, memoryview)
_SHOWN = 200  # characters of a value in an error


def check_fields(owner: object) -> None:
    """Convert each field of a frozen dataclass to its annotated type, Any excepted; the caller's values are copied.

    Raises ValueError that names the field.
    """
    for name, kind in _annotations(type(owner)).items():
        object.__setattr__(owner, name, check(f"{type(owner).__name__}.{name}", getattr(owner, name), kind))


def check(name: str, value: object, kind: Any) -> Any:
    """Convert a value to a type; the caller's values are copied. Raises ValueError that names it."""
    try:
        return msgspec.convert(plain(value), kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: an integer of thousands of digits
        raise ValueError(f"{name} must be {_description(kind)}, got {shown(value)}.") from None


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
    if type(None) in get_args(kind):
        return f"{' or '.join(_description(part) for part in get_args(kind) if part is not type(None))} or None"
    return _DESCRIPTIONS.get(kind, getattr(kind, "__name__", str(kind)))
