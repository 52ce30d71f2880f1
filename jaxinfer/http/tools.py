"""The functions that a model may call, as requests give them, and the choice among them."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from jaxinfer.fields import shown
from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.http.errors import BadRequestError
from jaxinfer.sandbox.json_schemas import change_schemas
from jaxinfer.text.parsing.calls import FORCED, arguments_alone
from jaxinfer.text.parsing.parser import CallSyntax, Schemas

MAX_TOOLS = 1024
_NAME = re.compile(r"[\w.:/\-]{1,256}")
INSTRUCTIONS = """\
You may call these functions, given as JSON Schemas:
{functions}
To call functions, answer with nothing but JSON of this form, one object for each call:
[{{"name": "the function's name", "arguments": {{"the parameter's name": "its value"}}}}]
Answer as usual if no function helps."""
"""The system message of a model whose chat template does not tell it of tools."""


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that a model may call.

    Attributes:
      name: its name.
      description: what it does.
      parameters: a JSON Schema of its arguments; None: it has none.
      strict: changes nothing: the arguments of a forced call always satisfy the schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Tools:
    """The tools of a request, checked.

    Args:
      tools: the functions.
      choice: whether the model may call one, must call one, or which one.
      parallel: whether it may call several at once.

    Raises BadRequestError, naming the field.
    """

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool = True):
        self._functions = [tool.function for tool in tools]
        self.parallel = parallel
        if len(tools) > MAX_TOOLS:
            raise BadRequestError(f"tools must be at most {MAX_TOOLS}, got {len(tools)}.", param="tools")
        names = [function.name for function in self._functions]
        for index, name in enumerate(names):
            if not _NAME.fullmatch(name):
                raise BadRequestError(
                    f"tools[{index}] must have a name of 1 to 256 letters, digits, or any of _ . : / -, got "
                    f"{shown(name)}.",
                    param="tools",
                )
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRequestError(f"tools has two functions of the name {shown(twice)}.", param="tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise BadRequestError(
                f"tool_choice names {shown(choice.function.name)}, which is none of tools.", param="tool_choice"
            )
        if choice == "required" and not names:
            raise BadRequestError("tool_choice demands a call, which needs tools.", param="tool_choice")
        self._choice = choice or "auto"

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The functions of which the model is told, as JSON."""
        if self._choice == "none":
            return []
        return [msgspec.to_builtins(Tool(type="function", function=_shown(each))) for each in self._functions]

    @property
    def schemas(self) -> Schemas | None:
        """The parameters of the functions that it may call; None: it may call none."""
        if self._choice == "none" or not self._functions:
            return None
        return {function.name: function.parameters or {} for function in self._functions}

    @property
    def forced(self) -> CallSyntax | None:
        """The form of the answer if it must be a call; None: it need not."""
        if isinstance(self._choice, NamedTool):
            return arguments_alone(self._choice.function.name)
        return FORCED if self._choice == "required" else None

    def constraint(self) -> StructuredOutputsParams | None:
        """The grammar of an answer that must be a call; None: it need not."""
        if isinstance(self._choice, NamedTool):
            chosen = self._choice.function.name
            parameters = next(each.parameters for each in self._functions if each.name == chosen)
            return StructuredOutputsParams(json=_object(parameters))
        if self._choice != "required":
            return None
        schemas = [_object(function.parameters) for function in self._functions]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    "arguments": {"$ref": f"#/$defs/{index}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, function in enumerate(self._functions)
        ]
        schema: dict[str, Any] = {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": calls},
            "$defs": {str(index): _moved(each, f"#/$defs/{index}") for index, each in enumerate(schemas)},
        }
        if not self.parallel:
            schema["maxItems"] = 1
        return StructuredOutputsParams(json=schema)

    @functools.cached_property
    def instructions(self) -> str:
        """The system message of a model that does not learn of the tools by its template."""
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.offered)
        return INSTRUCTIONS.format(functions=functions)


def _shown(function: Function) -> Function:
    """The function without what templates do not know."""
    return Function(name=function.name, description=function.description or "", parameters=_object(function.parameters))


def _object(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A schema of arguments, which are an object."""
    return {"type": "object", "properties": {}, **(parameters or {})}


def _moved(schema: dict[str, Any], root: str) -> dict[str, Any]:
    """A schema as a part of another one: its references to itself begin at its new place."""

    def change(each: dict[str, Any]) -> dict[str, Any]:
        reference = each.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            return each | {"$ref": root + reference[1:]}
        return each

    return change_schemas(schema, change)


def tell_of(tools: Tools, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation whose system message has the instructions; its calls and their results are texts."""
    made = [{"role": "system", "content": tools.instructions}]
    for message in messages:
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            content = "\n".join(filter(None, (message.get("content"), json.dumps(functions, ensure_ascii=False))))
            message = {"role": message["role"], "content": content}
        elif message.get("role") == "tool":
            message = {"role": "user", "content": f"The result of the call: {message.get('content') or ''}"}
        if message.get("role") == "system" and len(made) == 1:
            made[0]["content"] = f"{message.get('content') or ''}\n\n{tools.instructions}"
        else:
            made.append(message)
    return made


def with_arguments(messages: list[dict[str, Any]], *, as_text: bool = False) -> list[dict[str, Any]]:
    """A conversation in which the arguments of calls are objects, as most chat templates want them, or JSON texts.

    Raises BadRequestError.
    """
    made = []
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise BadRequestError(
                    f"messages[{index}].tool_calls must be a list, got {shown(calls)}.", param="messages"
                )
            place = f"messages[{index}].tool_calls"
            made_calls = [_with_arguments(f"{place}[{n}]", call, as_text=as_text) for n, call in enumerate(calls)]
            message = message | {"tool_calls": made_calls}
        made.append(message)
    return made


def decode_arguments(place: str, text: str, *, param: str) -> dict[str, Any]:
    """Decode the arguments of a call that a client sends back. Raises BadRequestError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise BadRequestError(f"{place} must be the JSON text of an object, got {shown(text)}.", param=param) from None


def _with_arguments(place: str, call: Any, *, as_text: bool) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(), **rest}} if isinstance(rest.get("arguments", ""), str | dict):
            function = call["function"]
        case _:
            raise BadRequestError(
                f'{place} must be {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": "..."}}}}, '
                f"got {shown(call)}.",
                param="messages",
            )
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = decode_arguments(f"{place}.function.arguments", arguments, param="messages")
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}
