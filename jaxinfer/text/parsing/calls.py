"""How families of models write calls of functions, after their published chat templates."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from jaxinfer.text.parsing.parser import CallSyntax, IncompleteCallError, NotACallError, Schemas, ToolCall

TRUNCATED = "Input data was truncated"
"""The message of msgspec for JSON that could go on."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


def arguments_of(text: str) -> str:
    """Check the arguments of a call; a JSON text of an object stands for it. Raises as `parse` of `CallSyntax`."""
    text = text.strip()
    if text.startswith('"'):
        text = _read(_decode_text, text).strip()
    if text in ("", "null"):
        return "{}"
    _read(_decode_fields, text)
    return text


def _read[Value](decode: Callable[[str], Value], text: str) -> Value:
    try:
        return decode(text)
    except RecursionError:
        raise NotACallError from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise (IncompleteCallError if str(error) == TRUNCATED else NotACallError) from None


def _json_call(text: str, *, needs_arguments: bool = False) -> ToolCall:
    """Read `{"name": ..., "arguments": {...}}`, or with "parameters"; it may be in the field "function" of another."""
    fields = {key: bytes(value).decode() for key, value in _read(_decode_fields, text).items()}
    if "function" in fields and "name" not in fields:
        if fields["function"].startswith("{"):
            return _json_call(fields["function"], needs_arguments=needs_arguments)
        fields["name"] = fields["function"]
    given = next((fields[key] for key in ("arguments", "parameters") if key in fields), None)
    if "name" not in fields or (given is None and needs_arguments):
        raise NotACallError
    if not (name := _read(_decode_text, fields["name"])):
        raise NotACallError
    try:
        return ToolCall(name, arguments_of(given or ""))
    except IncompleteCallError:  # within a JSON text, which is complete
        raise NotACallError from None


def _one_json(text: str, schemas: Schemas) -> list[ToolCall]:
    return [_json_call(text)]


def _json_list(text: str, *, needs_arguments: bool = False) -> list[ToolCall]:
    """Read one call, several in a list, or several with semicolons in between."""
    text = text.strip()
    if text.startswith("["):
        texts = [bytes(each).decode() for each in _read(_decode_list, text)]
    else:
        texts = list(_objects(text))
    if not texts:
        raise NotACallError
    return [_json_call(each, needs_arguments=needs_arguments) for each in texts]


def _objects(text: str) -> Iterator[str]:
    """Yield the texts of JSON objects that follow each other."""
    place = 0
    while place < len(text):
        try:
            _, end = _scanner.raw_decode(text, place)
        except (ValueError, RecursionError):
            _read(_decode_fields, text[place:])  # says what is wrong
            raise NotACallError from None
        yield text[place:end]
        place = cast(re.Match[str], _BETWEEN.match(text, end)).end()


_scanner = json.JSONDecoder(strict=True)
_BETWEEN = re.compile(r"[\s;,]*")


def _generic(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read `{"name": ..., "arguments": {...}}`, several in a list or with semicolons, perhaps in a Markdown block."""
    if fenced := _FENCED.fullmatch(text):
        text = fenced[1]
    return _json_list(text, needs_arguments=True)


_FENCED = re.compile(r"\s*```(?:\w+)?\n(.*)```\s*", re.DOTALL)


def _mistral(text: str, schemas: Schemas) -> list[ToolCall]:
    """A list of JSON, or from version 11 on `NAME[ARGS]{...}`."""
    if text.lstrip().startswith(("[", "{")):
        return _json_list(text)
    if (call := _MISTRAL.fullmatch(text)) is None:
        raise NotACallError
    return [ToolCall(call[1], arguments_of(call[2]))]


_MISTRAL = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _glm(text: str, schemas: Schemas) -> list[ToolCall]:
    """`NAME`, and for each argument `<arg_key>K</arg_key><arg_value>V</arg_value>`."""
    name = _WORD.match(text)
    if name is None:
        raise NotACallError
    values, place = dict[str, str](), name.end()
    while place < len(text):
        if (pair := _GLM_PAIR.match(text, place)) is None:
            raise IncompleteCallError if text.startswith("<arg_key>", place) else NotACallError
        values[pair[1].strip()], place = pair[2], pair.end()
    return [_call_of(name[1], values, schemas)]


_WORD = re.compile(r"\s*([^\s<>{}]+)\s*")
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _qwen_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    """`NAME>`, and for each argument `<parameter=K>`, V and `</parameter>` in lines of their own."""
    function = _QWEN_NAME.match(text)
    if function is None:
        raise NotACallError
    values, place = dict[str, str](), function.end()
    while place < len(text):
        if (pair := _QWEN_PARAMETER.match(text, place)) is None:
            raise IncompleteCallError if text.startswith("<parameter=", place) else NotACallError
        values[pair[1]], place = pair[2], pair.end()
    return [_call_of(function[1], values, schemas)]


_QWEN_NAME = re.compile(r"([^>\s]+)>\s*")
_QWEN_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


def _deepseek(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read `function`, the separator, `NAME` and JSON in a block of Markdown; from V3.1 `NAME`, separator and JSON."""
    left, separator, right = text.partition("<｜tool▁sep｜>")
    if not separator:
        raise NotACallError
    if fenced := _DEEPSEEK.match(right):
        body = fenced[2].rstrip()
        if not body.endswith("```"):
            raise IncompleteCallError
        return [ToolCall(fenced[1], arguments_of(body.removesuffix("```")))]
    if not (name := left.strip()):
        raise NotACallError
    return [ToolCall(name, arguments_of(right))]


_DEEPSEEK = re.compile(r"\s*([^\s`{]+)\s*```(?:json)?\n(.*)", re.DOTALL)


def _deepseek_markup(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read V3.2: `NAME">`, and for each argument `<｜DSML｜parameter name="K" string="true">V</｜DSML｜parameter>`."""
    function = _DSML_NAME.match(text)
    if function is None:
        raise NotACallError
    values, place = dict[str, Any](), function.end()
    while place < len(text):
        if (pair := _DSML_PARAMETER.match(text, place)) is None:
            raise IncompleteCallError if text.startswith("<｜DSML｜parameter", place) else NotACallError
        values[pair[1]] = pair[3] if pair[2] == "true" else _value(pair[3], set())
        place = pair.end()
    return [ToolCall(function[1], json.dumps(values, ensure_ascii=False))]


_DSML_NAME = re.compile(r'([^"]+)">\s*')
_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>\s*', re.DOTALL
)


def _call_of(name: str, values: dict[str, str], schemas: Schemas) -> ToolCall:
    """A call whose values are written without their types, which the function's schema has."""
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    typed = {key: _value(text, _types(properties.get(key), schema)) for key, text in values.items()}
    return ToolCall(name, json.dumps(typed, ensure_ascii=False))


def _types(schema: Any, root: dict[str, Any], depth: int = 8) -> set[str]:
    """The types that a schema allows, by their names in JSON Schema; none: it does not say."""
    if not isinstance(schema, dict) or not depth:
        return set()
    match schema:
        case {"$ref": str(reference)}:
            target: Any = root
            for part in reference.removeprefix("#/").split("/"):
                target = target.get(part) if isinstance(target, dict) else None
            return _types(target, root, depth - 1)
        case {"type": str(name)}:
            return {name}
        case {"type": [*names]}:
            return {name for name in names if isinstance(name, str)}
        case {"const": value}:
            return _types_of(value)
        case {"enum": [*values]}:
            return set().union(*map(_types_of, values))
        case {"anyOf": [*parts]} | {"oneOf": [*parts]} | {"allOf": [*parts]}:
            return set().union(*(_types(part, root, depth - 1) for part in parts))
    return set()


def _types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _value(text: str, types: set[str]) -> Any:
    """The value of a text: JSON, or as Python writes it, unless it must or may be a text and nothing else fits."""
    if types == {"string"}:
        return text
    value = _PYTHON.get(text.strip(), text) if types else text
    with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
        value = msgspec.json.decode(text)
    return text if "string" in types and (isinstance(value, str) or not types & _types_of(value)) else value


_PYTHON = {"True": True, "False": False, "None": None}
"""How templates write values that are no texts, of which models learn it."""


def arguments_alone(name: str) -> CallSyntax:
    """The answer is the arguments of one function, since a grammar says so."""
    return CallSyntax(None, None, lambda text, _: [ToolCall(name, arguments_of(text))], bare=True, forced=True)


FORCED = CallSyntax(None, None, _generic, bare=True, forced=True)
"""The answer is a list of calls, since a grammar says so."""

SYNTAXES = {
    "hermes": CallSyntax("<tool_call>", "</tool_call>", _one_json),
    "qwen3_coder": CallSyntax(  # models sometimes leave the outer marker out
        "<function=", "</function>", _qwen_coder, ignored=("<tool_call>", "</tool_call>"), closed=True
    ),
    "glm45": CallSyntax("<tool_call>", "</tool_call>", _glm, others=("<arg_key>", "<arg_value>"), closed=True),
    "llama3_json": CallSyntax("<|python_tag|>", None, _generic, bare=True),
    "mistral": CallSyntax("[TOOL_CALLS]", None, _mistral, others=("[ARGS]", "[CALL_ID]")),
    "deepseek_v3": CallSyntax(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _deepseek,
        ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        others=("<｜tool▁sep｜>",),
    ),
    "deepseek_v32": CallSyntax(
        '<｜DSML｜invoke name="',
        "</｜DSML｜invoke>",
        _deepseek_markup,
        ignored=(  # of V3.2, and of V4
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
        ),
        closed=True,
    ),
    "json": CallSyntax(None, None, _generic, bare=True),
}
"""The ways to write calls, by the names of vLLM's parsers."""
