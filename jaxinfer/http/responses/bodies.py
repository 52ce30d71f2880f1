"""The body of `/v1/responses`: OpenAI's fields, and vLLM's for sampling. Any other field is refused by its name."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.http.bodies import SamplingBody
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.tools import Function, FunctionName, NamedTool, Tool, Tools

ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""The only name that `include` takes."""


class ItemPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item's content. Fields that change no text are ignored, in items too: clients send back answers."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a conversation: a message, a call, its result, reasoning, or the id of a stored item."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    encrypted_content: str | None = None

    @property
    def kind(self) -> str:
        """Its type, which messages and references may leave out."""
        return self.type or ("item_reference" if self.id is not None and self.role is None else "message")


class FlatFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool, which is a function; as in `tools.Function`."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class TextForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text: any text, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the text. verbosity: changes nothing."""

    format: TextForm | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of reasoning. Summaries are not made: the reasoning itself is in the answer."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ObfuscationOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream, which has no obfuscation in any case."""

    include_obfuscation: bool | None = None


class ResponseBody(SamplingBody, kw_only=True):
    """The body of `/v1/responses`."""

    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: tuple[FlatFunction, ...] = ()
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool = True
    include: tuple[str, ...] = ()
    truncation: Literal["disabled"] = "disabled"
    background: bool = False
    top_logprobs: int = 0
    # These change no answer.
    max_tool_calls: int | None = None
    stream_options: ObfuscationOptions | None = None
    prompt_cache_retention: str | None = None

    @property
    def effort(self) -> str | None:
        """How much the model is to reason."""
        return self.reasoning and self.reasoning.effort

    def check(self) -> None:
        """Raise BadRequestError for values that are not implemented."""
        for field in ("background", "top_logprobs"):
            if value := getattr(self, field):
                raise BadRequestError(f"{field}={value} is not implemented.", param=field)
        if others := [name for name in self.include if name != ENCRYPTED_REASONING]:
            raise BadRequestError(f"include: {others[0]} is not implemented.", param="include")

    def _constraint(self) -> StructuredOutputsParams | None:
        """The constraint on the text; None: any text."""
        form = self.text and self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return StructuredOutputsParams(json={"type": "object"})
        if form.name is None or form.schema is None:
            raise BadRequestError("text.format needs name and schema with type=json_schema.", param="text.format")
        return StructuredOutputsParams(json=form.schema)

    def params(self) -> dict[str, Any]:
        """The options of `SamplingParams`."""
        given = {"max_tokens": self.max_output_tokens} | self.sampling()
        if (constraint := self._constraint()) is not None:
            if self.structured_outputs is not None:
                raise BadRequestError("give text.format or structured_outputs, not both.", param="text.format")
            given["structured_outputs"] = constraint
        return given

    def checked_tools(self) -> Tools:
        """The tools. Raises BadRequestError."""
        tools = [
            Tool(
                type="function",
                function=Function(name=each.name, description=each.description, parameters=each.parameters),
            )
            for each in self.tools
        ]
        choice = self.tool_choice
        if isinstance(choice, FlatChoice):
            choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        return Tools(tools, choice, parallel=self.parallel_tool_calls)
