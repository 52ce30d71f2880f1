"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`. Any other field is refused by its name."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxinfer.generation.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, StructuredOutputsParams
from jaxinfer.http.bodies import SamplingBody
from jaxinfer.http.errors import BadRequestError

CacheControl = dict[str, Any] | None
"""Where Anthropic's cache ends. Ours needs no such marks: all fields of this type change nothing."""

_StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """A text."""

    text: str
    cache_control: CacheControl = None
    citations: list[dict[str, Any]] | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="thinking"):
    """Reasoning of an earlier answer. signature: not checked."""

    thinking: str
    signature: str = ""
    cache_control: CacheControl = None


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="redacted_thinking"):
    """Reasoning that only Anthropic can read; left out."""

    data: str
    cache_control: CacheControl = None


class ToolUseBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="tool_use"):
    """A call of a tool in an earlier answer. caller, toolset_name: change nothing."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


class ToolResultBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="tool_result"):
    """The result of a call, a text or blocks of text. toolset_name: changes nothing."""

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: str | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation. content: a text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CustomTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs.

    Attributes:
      name: its name.
      input_schema: a JSON Schema of its input.
      description: what it does.
      strict: changes nothing: the input of a forced call always satisfies the schema. So do the others change nothing.
    """

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class BlockToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model may call a tool, must call any, or the named one, and whether several at once."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons first.

    Attributes:
      type: "disabled": not, if its chat template can say so; then no answer shows reasoning.
      budget_tokens: the most tokens of reasoning.
      display: "omitted": the answer has blocks of thinking without their texts.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema that the text must satisfy."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, and the effort of reasoning, for chat templates that know efforts."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(SamplingBody, kw_only=True):
    """The body of `/v1/messages/count_tokens`; fields about the choice of tokens change no count."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: BlockToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # These change no answer.
    cache_control: CacheControl = None
    container: str | dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: int
    stop_sequences: Annotated[list[_StopSequence], Meta(max_length=MAX_STOP_STRINGS)] | None = None

    def params(self) -> dict[str, Any]:
        """The options of `SamplingParams`. Raises BadRequestError."""
        form = self.output_config and self.output_config.format
        if form and self.structured_outputs is not None:
            raise BadRequestError("give output_config.format or structured_outputs, not both.", param="output_config")
        constraint = StructuredOutputsParams(json=form.schema) if form else None
        return self.sampling(stop=self.stop_sequences, structured_outputs=constraint)
