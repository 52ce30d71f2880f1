"""Calls that a request forces are valid JSON for their schemas, such as pydantic makes of classes."""

import json

import jsonschema
import msgspec
import numpy as np
import pytest

from tests.generation.sampling.test_structured_outputs import Model
from tests.tiny import byte_tokenizer

pytest.importorskip("starlette")

NAMES = ("name", "$ref", "properties", "const", "items", "type", "größe", "a b", 'quo"te', "default", "Enum_1", "x/y~z")


class Schemas:
    """Random schemas as pydantic makes them of a class, which may have classes as fields, and itself."""

    def __init__(self, rng):
        self._rng, self._defs = rng, {}

    def model(self):
        """The schema of a class."""
        for index in range(int(self._rng.integers(4))):
            kind = self._enum if self._rng.random() < 0.4 else self._object
            self._defs[f"Class{index}"] = kind(1, title=f"Class{index}")
        made = self._object(3, title="Model")
        if self._defs:
            made = {"$defs": self._defs} | made
        if self._rng.random() < 0.1:  # of a class that has itself as a field
            node = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}], "default": None}
            made.setdefault("properties", {})["next"] = node
            defs = made.pop("$defs", {})
            made = {"$defs": defs | {"Node": made}, "$ref": "#/$defs/Node"}
        if self._rng.random() < 0.2:
            made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return made

    def _object(self, depth, *, title):
        names = self._rng.choice(NAMES, size=int(self._rng.integers(5)), replace=False).tolist()
        properties = {name: self._field(depth - 1) for name in names}
        made = {"properties": properties, "title": title, "type": "object"}
        if required := [name for name, field in properties.items() if "default" not in field]:
            made["required"] = required
        if self._rng.random() < 0.5:
            made["additionalProperties"] = False
        if self._rng.random() < 0.3:
            made["description"] = 'Of a "class".\n\n§ two'
        return made

    def _field(self, depth):
        field = self._value(depth)
        if self._rng.random() < 0.4:
            field = {"anyOf": [field, {"type": "null"}], "default": None}
        if self._rng.random() < 0.5:
            field = {**field, "title": "A title"}
        if self._rng.random() < 0.3:
            field = {**field, "description": "What it says", "examples": [{"$ref": "#/nowhere"}]}
        return field

    def _value(self, depth):
        kinds = [self._string, self._number, self._constant, lambda _: {"type": "boolean"}, self._any_of]
        if depth > 0:
            kinds += [self._array, self._tuple, self._dictionary, self._union]
        if self._defs:
            kinds += [self._reference] * 3
        return kinds[self._rng.integers(len(kinds))](depth)

    def _string(self, _):
        forms = (
            {"maxLength": 8},
            {"minLength": 1, "maxLength": 4},
            {"format": "date"},
            {"format": "date-time"},
            {"format": "uuid"},
            {"format": "binary", "maxLength": 3},
            {"pattern": "^[a-z]{2,4}$"},
            {},
        )
        return {"type": "string", **forms[self._rng.integers(len(forms))]}

    def _number(self, _):
        kind = str(self._rng.choice(["integer", "number"]))
        forms = ({}, {"minimum": 0}, {"exclusiveMinimum": 0, "maximum": 150}, {"minimum": -5, "maximum": 5})
        return {"type": kind, **forms[self._rng.integers(len(forms))]}

    def _constant(self, _):
        forms = ({"const": "a", "type": "string"}, {"enum": [1, 2, 3], "type": "integer"}, {"enum": ["a", None, 1]})
        return dict(forms[self._rng.integers(len(forms))])

    def _enum(self, _, *, title):
        return {"enum": ["red", "grün", 'a"b'], "title": title, "type": "string"}

    def _any_of(self, depth):
        return {"anyOf": [self._string(depth), self._number(depth)]}

    def _array(self, depth):
        made = {"items": self._value(depth - 1), "type": "array"}
        return made | ({"minItems": 1, "maxItems": 3} if self._rng.random() < 0.5 else {})

    def _tuple(self, depth):
        items = [self._value(depth - 1) for _ in range(2)]
        return {"maxItems": 2, "minItems": 2, "prefixItems": items, "type": "array"}

    def _dictionary(self, depth):
        return {"additionalProperties": self._value(depth - 1), "type": "object"}

    def _union(self, depth):
        """Two classes that a field tells apart."""
        made = []
        for kind in ("cat", "dog"):
            fields = {"kind": {"const": kind, "type": "string"}, "value": self._value(depth - 1)}
            made.append({"properties": fields, "required": ["kind", "value"], "type": "object"})
        discriminator = {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"}
        return {"discriminator": discriminator, "oneOf": made}

    def _reference(self, _):
        reference = {"$ref": f"#/$defs/{self._rng.choice(sorted(self._defs))}"}
        forms = (reference, {"allOf": [reference], "description": "inherits"}, reference | {"description": "says"})
        return forms[self._rng.integers(len(forms))]


@pytest.fixture(scope="module")
def model():
    return Model(byte_tokenizer(), vocab=257, eos_ids=(256,))


def check(model, seed):
    """Write calls at random, as a request with these tools forces them, and check them."""
    from jaxinfer.http.tools import Tool, ToolChoice, Tools

    rng = np.random.default_rng(seed)
    schemas = {f"f{index}": Schemas(rng).model() for index in range(int(rng.integers(1, 4)))}
    tools = [
        msgspec.convert({"type": "function", "function": {"name": name, "parameters": schema}}, Tool)
        for name, schema in schemas.items()
    ]
    named = str(rng.choice(list(schemas)))
    for choice in ("required", named):
        given = choice if choice == "required" else {"type": "function", "function": {"name": named}}
        made = Tools(tools, msgspec.convert(given, ToolChoice), parallel=bool(rng.integers(2)))
        parser = made.forced
        text = model.write(made.constraint(), rng, patience=60)
        calls = parser.parse(text, made.schemas)
        assert calls
        assert made.parallel or len(calls) == 1
        for call in calls:
            assert choice == "required" or call.name == named
            validator = jsonschema.Draft202012Validator(schemas[call.name])
            validator.check_schema(schemas[call.name])
            errors = [error.message for error in validator.iter_errors(json.loads(call.arguments))]
            assert not errors, (schemas[call.name], call.arguments)


@pytest.mark.parametrize("seed", range(20))
def test_forced_calls_satisfy_their_schemas(model, seed):
    check(model, seed)


@pytest.mark.slow
def test_a_thousand_forced_calls_satisfy_their_schemas(model):
    for seed in range(20, 1020):
        check(model, seed)
