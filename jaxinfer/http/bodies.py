"""The bodies of requests: OpenAI's fields, and vLLM's by their names. Any other field is refused by its name."""

import dataclasses
import re
from typing import Any, Literal

import msgspec

from jaxinfer.fields import shown
from jaxinfer.generation.params import SamplingParams, StructuredOutputsParams
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.tools import Tool, ToolChoice

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none, as in the OpenAI API."""

_SAME = [field.name for field in dataclasses.fields(SamplingParams)]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of every body. null stands for a field that is left out."""

    # These change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream.

    Attributes:
      include_usage: whether a last chunk has the usage of the whole request.
      continuous_usage_stats: whether every chunk has the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema that the text must satisfy. Every schema is kept to strictly."""

    name: str
    schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text: any text, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """The constraint on the text; None: any text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json={"type": "object"})
            case _:
                if self.json_schema is None:
                    raise BadRequestError("response_format.json_schema is missing.", param="response_format")
                return StructuredOutputsParams(json=self.json_schema.schema)


class SamplingBody(Body, kw_only=True):
    """The fields of all answers that a model generates. The model is required, as in the OpenAI API."""

    model: str
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    # vLLM's
    top_k: int | None = None
    priority: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def sampling(self, **others: Any) -> dict[str, Any]:
        """The options of `SamplingParams` that the body gives. Raises BadRequestError."""
        given = {name: value for name in _SAME if (value := getattr(self, name, None)) is not None}
        given |= {name: value for name, value in others.items() if value is not None}
        if self.seed is not None:  # of OpenAI's 64 bits, which may be negative
            given["seed"] = self.seed % 2**32
        if given.get("top_k") == -1:  # vLLM's way to keep all
            given["top_k"] = 0
        if self.logit_bias is not None:
            given["logit_bias"] = _by_token(self.logit_bias)
        if self.structured_outputs is not None:
            given["structured_outputs"] = _structured(self.structured_outputs)
        return given


class GenerationBody(SamplingBody, kw_only=True):
    """The fields of completions and chats."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logits_processors: list[str] | None = None

    def sampling(self, **others: Any) -> dict[str, Any]:
        """The options of `SamplingParams` that the body gives. Raises BadRequestError."""
        given = super().sampling(**others)
        if self.response_format is not None and (constraint := self.response_format.structured_outputs()) is not None:
            if self.structured_outputs is not None:
                raise BadRequestError("give response_format or structured_outputs, not both.", param="response_format")
            given["structured_outputs"] = constraint
        return given

    def check_stream_options(self) -> StreamOptions:
        """Return the options of the stream. Raises BadRequestError for options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options needs stream=true.", param="stream_options")
        return self.stream_options or StreamOptions()


class CompletionBody(GenerationBody, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None

    def params(self) -> dict[str, Any]:
        """The options of `SamplingParams`; `echo` asks for the prompt's log probabilities as for the output's."""
        prompt_logprobs = self.logprobs if self.echo and self.prompt_logprobs is None else None
        options = {"max_tokens": COMPLETION_TOKENS} | self.sampling(prompt_logprobs=prompt_logprobs)
        if self.echo and options["max_tokens"] == 0:  # lm-eval: the prompt alone
            options["max_tokens"] = 1
        return options


class ChatBody(GenerationBody, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[Tool] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None

    def params(self) -> dict[str, Any]:
        """The options of `SamplingParams`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        options = self.sampling(max_tokens=self.max_completion_tokens)
        options.pop("logprobs", None)
        return {"max_tokens": None} | options | ({} if logprobs is None else {"logprobs": logprobs})

    def template_options(self) -> dict[str, Any]:
        """The options of `ChatOptions`."""
        names = (
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs",
            "documents",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def as_prompts(name: str, value: Any, most: int) -> list[Any]:
    """The prompts of a field, one or several, each a text or token ids; at most so many. Raises BadRequestError."""
    kinds = {str} if isinstance(value, str) else {type(part) for part in value}
    if len(kinds) > 1:
        raise BadRequestError(f"{name} must be a text, token ids, or a list of texts or of token ids.", param=name)
    prompts = [value] if isinstance(value, str) or kinds == {int} else value
    if not 1 <= len(prompts) <= most:
        raise BadRequestError(f"{name} must be 1 to {most} texts, got {len(prompts)}.", param=name)
    return prompts


def text_alone(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with contents that are texts, of parts one a line. Raises BadRequestError for other parts."""

    def text_of(place: str, part: Any) -> str:
        match part:
            case {"type": "text", "text": str(text)}:
                return text
            case {"type": str(kind)} if kind != "text":
                raise BadRequestError(f"{place} is of type {shown(kind)}; models here take text alone.", param=place)
        raise BadRequestError(f'{place} must be {{"type": "text", "text": ...}}, got {shown(part)}.', param=place)

    made = []
    for index, message in enumerate(messages):
        if isinstance(parts := message.get("content"), list):
            places = [f"messages[{index}].content[{number}]" for number in range(len(parts))]
            message = message | {"content": "\n".join(map(text_of, places, parts))}
        made.append(message)
    return made


def decode[Kind: Body](content: bytes, kind: type[Kind]) -> Kind:
    """Decode the body of a request. Raises BadRequestError, naming the field."""
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None


def convert_at[Kind](place: str, value: Any, kind: type[Kind]) -> Kind:
    """Convert a part of a body. Raises BadRequestError, naming the field.

    Args:
      place: the part's own place in the body, such as "tools[0]".
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error), place) from None


def refusal_of(message: str, part: str = "") -> BadRequestError:
    """The error of a body, or a part of one, that msgspec refuses, in words that name the field."""
    what, _, place = message.partition(" - at `$")
    where = (part + place.rstrip("`")).lstrip(".")
    named = re.match(r"Object (?:contains unknown|missing required) field `(.*)`", what, re.DOTALL)
    field = ".".join(filter(None, (where, named and (named.group(1) or "''")))) or None
    if what.startswith("Object contains unknown field"):
        return BadRequestError(f"{field} is not a field of this endpoint, or is not implemented.", param=field)
    return BadRequestError(f"{where or 'the body'}: {what}.", param=field)


def _by_token(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise BadRequestError("logit_bias must have token ids as its names.", param="logit_bias") from None


def _structured(fields: dict[str, Any]) -> StructuredOutputsParams:
    known = {field.name for field in dataclasses.fields(StructuredOutputsParams)}
    if unknown := sorted(fields.keys() - known):
        raise BadRequestError(f"structured_outputs.{unknown[0]} is not implemented.", param="structured_outputs")
    return StructuredOutputsParams(**fields)
