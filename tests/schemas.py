"""Random JSON schemas for tests of structured output: every value that satisfies one can be short."""

from typing import Any

import numpy as np

_LETTERS = np.array(list("abcdé日\"\\/ '"))
_PATTERNS = ("^[a-z]{1,5}$", "^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", r"^\d{4}-\d{2}$")
_CONSTANTS = (None, True, False, 0, -3, 2.5, "", "a", 'say "hi"', "tab\tnew\nline", [1, [2]], {"k": None})


def random_schema(rng: np.random.Generator) -> dict[str, Any]:
    """A schema of at most four levels: keywords that llguidance compiles, and bounds that can be met."""
    kind = (_object, _object, _array, _any_of, _value)[rng.integers(5)]
    return kind(rng, 3)


def _value(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    kinds = [_integer, _number, _string, _pattern, _boolean, _null, _const, _enum]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return kinds[rng.integers(len(kinds))](rng, depth)


def _object(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    names = list(dict.fromkeys(_word(rng) for _ in range(rng.integers(1, 5))))
    schema = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    return schema | {"additionalProperties": {"type": "boolean"} if rng.random() < 0.2 else False}


def _array(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(rng.integers(3))
    most = least + int(rng.integers(3))
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": least, "maxItems": most}


def _any_of(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.integers(1, 4))]}


def _integer(rng: np.random.Generator, _: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    least = int(rng.integers(-1000, 1000))
    if rng.random() < 0.7:
        schema[str(rng.choice(["minimum", "exclusiveMinimum"]))] = least
    if rng.random() < 0.7:
        schema[str(rng.choice(["maximum", "exclusiveMaximum"]))] = least + int(rng.integers(2, 2000))
    return schema


def _number(rng: np.random.Generator, _: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number"}
    least = round(float(rng.normal(0, 50)), 2)
    if rng.random() < 0.5:
        schema["minimum"] = least
    if rng.random() < 0.5:  # bounds that values may equal: a float next to an exclusive one is read as the bound
        schema["maximum"] = least + 0.5
    return schema


def _string(rng: np.random.Generator, _: int) -> dict[str, Any]:
    least = int(rng.integers(3))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(8))}


def _pattern(rng: np.random.Generator, _: int) -> dict[str, Any]:
    return {"type": "string", "pattern": _PATTERNS[rng.integers(len(_PATTERNS))]}


def _boolean(rng: np.random.Generator, _: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: np.random.Generator, _: int) -> dict[str, Any]:
    return {"type": "null"}


def _const(rng: np.random.Generator, _: int) -> dict[str, Any]:
    return {"const": _CONSTANTS[rng.integers(len(_CONSTANTS))]}


def _enum(rng: np.random.Generator, _: int) -> dict[str, Any]:
    chosen = rng.choice(len(_CONSTANTS), int(rng.integers(1, 5)), replace=False)
    return {"enum": [_CONSTANTS[i] for i in chosen]}


def _word(rng: np.random.Generator) -> str:
    return "".join(rng.choice(_LETTERS, int(rng.integers(1, 6))))
