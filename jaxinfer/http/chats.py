"""A conversation with a model, which all APIs of chats share: what is asked, and the parts of the answer."""

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxinfer.generation.api.async_llm import OutputStream
from jaxinfer.generation.engine.view import CompletionSnapshot, RequestSnapshot
from jaxinfer.generation.params import SamplingParams, StructuredOutputsParams
from jaxinfer.http.bodies import text_alone
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.limits import Limits
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.tools import Tools, tell_of, with_arguments
from jaxinfer.http.turns import TurnMemory, keys_of, turn_of
from jaxinfer.text import TextStream, Tokenizer
from jaxinfer.text.parsing import AnswerFormat, AnswerParser, Part, TextPart, ToolCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A question to a model, in whatever API.

    Attributes:
      messages: the conversation, as the OpenAI API writes it.
      tools: the functions that the model may call.
      sampling: options of `SamplingParams`.
      template: options of `ChatOptions`, but tools.
      reasoning_effort: how much the model is to reason, for templates that can say so.
      thinking_token_budget: how many tokens reasoning may take; None: any number.
    """

    messages: list[dict[str, Any]]
    tools: Tools
    sampling: dict[str, Any]
    template: dict[str, Any]
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None


class ChatAnswer(NamedTuple):
    """The answer to a chat.

    Attributes:
      stream: its text.
      make_parser: makes the parser of a completion; None: all is content.
      parallel: whether a completion may have more than one call.
      tokenizer: the model's.
      form: how the model writes calls.
      remember: keeps its last snapshot, for the next turn; None: the next turn writes it in another form.
    """

    stream: OutputStream
    make_parser: Callable[[], AnswerParser] | None
    parallel: bool
    tokenizer: Tokenizer
    form: AnswerFormat
    remember: Callable[[RequestSnapshot], None] | None

    def new_call_id(self, prefix: str = "call") -> str:
        """An id for a call. Mistral's templates take only ids of nine letters and digits."""
        return secrets.token_hex(5)[:9] if self.form.calls == "mistral" else f"{prefix}_{secrets.token_hex(12)}"

    def parts(self) -> "CompletionParts":
        """Tell the parts of a completion apart."""
        return CompletionParts(self.make_parser and self.make_parser(), parallel=self.parallel)

    async def end(self, snapshot: RequestSnapshot, parts: "Sequence[CompletionParts]") -> int:
        """Remember the answer, of its last snapshot; return how many tokens of all completions are reasoning."""
        return await asyncio.to_thread(self._end, snapshot, parts)  # a long answer takes milliseconds

    def _end(self, snapshot: RequestSnapshot, parts: "Sequence[CompletionParts]") -> int:
        if self.remember is not None:
            self.remember(snapshot)
        count = 0
        for completion, its_parts in zip(snapshot.completions, parts, strict=True):
            if self.make_parser is None or its_parts.reasoning_tokens is not None:
                count += its_parts.reasoning_tokens or 0
            else:
                count += _reasoning_tokens(completion, self.make_parser(), self.tokenizer)
        return count


class CompletionParts:
    """The parts of a completion while it grows.

    Attributes:
      num_calls: how many calls it has so far.
      reasoning_tokens: how many of its tokens are reasoning; None: several came at once, of which not all are.
    """

    def __init__(self, parser: AnswerParser | None, *, parallel: bool):
        self._parser, self._parallel, self.num_calls = parser, parallel, 0
        self.reasoning_tokens: int | None = 0

    def advance(self, completion: CompletionSnapshot, seen: CompletionSnapshot | None = None) -> list[Part]:
        """Return the parts that are new since it was seen."""
        text = completion.text(seen)
        if self._parser is None:
            return [TextPart("content", text)] if text else []
        before = self._parser.in_reasoning
        parts = self._parser.push(text) if text else []
        whole = bool(parts) and isinstance(parts[0], TextPart) and parts[0].kind == "reasoning"
        if before or whole or self._parser.in_reasoning:
            self._count_reasoning(completion, seen, all_of_it=before and self._parser.in_reasoning)
        if completion.finish_reason is not None:
            parts += self._parser.finish()
        for part in parts:
            if isinstance(part, ToolCall):  # few are, and each token comes here
                return [part for part in parts if not isinstance(part, ToolCall) or self._counted()]
        return parts

    def _count_reasoning(
        self, completion: CompletionSnapshot, seen: CompletionSnapshot | None, *, all_of_it: bool
    ) -> None:
        first = len(completion.sequence.request.prompt_token_ids) if seen is None else seen.num_tokens
        new = completion.num_tokens - first
        if self.reasoning_tokens is not None:
            self.reasoning_tokens = self.reasoning_tokens + new if all_of_it or new == 1 else None

    def _counted(self) -> bool:
        """Count a call; return whether the client gets it."""
        if self.num_calls and not self._parallel:
            return False
        self.num_calls += 1
        return True

    def finish_reason(self, completion: CompletionSnapshot) -> str | None:
        """The completion's finish reason, as the OpenAI API names it."""
        reason = completion.finish_reason
        return "tool_calls" if self.num_calls and reason == "stop" else reason


class ChatPrompt(NamedTuple):
    """The prompt of a chat.

    Attributes:
      text: the conversation, as the chat template writes it.
      token_ids: its tokens.
      key: the conversation's name, as of `keys_of`.
      form: how the model writes its answer.
      opened: whether the prompt ends within reasoning.
      make_parser: makes the parser of an answer.
    """

    text: str
    token_ids: list[int]
    key: bytes
    form: AnswerFormat
    opened: bool
    make_parser: Callable[[], AnswerParser]


async def encode_chat(model: ServedModel, chat: Chat) -> ChatPrompt:
    """Encode a chat, with the tokens of earlier answers that the model wrote. Raises BadRequestError, ValueError."""
    llm, tools = model.llm, chat.tools
    if llm.tokenizer is None:
        raise BadRequestError("the model directory has no tokenizer, so it cannot chat.")
    form = model.answer_format(chat.template.get("chat_template"), has_tools=bool(tools.offered))
    messages, options = with_arguments(text_alone(chat.messages), as_text=form.text_arguments), dict(chat.template)
    if tools.offered and form.knows_tools:
        options["tools"] = tools.offered
    elif tools.offered:
        messages = tell_of(tools, messages)
    options["chat_template_kwargs"] = _effort(form, chat.reasoning_effort) | (options.get("chat_template_kwargs") or {})
    key, before = keys_of(messages, **options)
    text = await llm.render_chat(messages, **options)
    opened = form.opens_reasoning(text)
    make_parser = functools.partial(form.parser, tools.schemas, opened=opened, forced=tools.forced)
    token_ids = await asyncio.to_thread(model.turns.encode, text, before, llm.tokenizer, make_parser)
    return ChatPrompt(text, token_ids, key, form, opened, make_parser)


async def begin_chat(model: ServedModel, chat: Chat, adapter: str | None, limits: Limits) -> ChatAnswer:
    """Begin to answer a chat. Raises BadRequestError, ValueError; OverloadedError."""
    llm, tools = model.llm, chat.tools
    llm.check_room(chat.sampling.get("priority") or 0)  # before it is prepared: refusals must be cheap
    prompt = await encode_chat(model, chat)
    assert llm.tokenizer is not None, "it has encoded the prompt"
    form, make_parser = prompt.form, prompt.make_parser
    sampling = _constrained(chat, form, prompt.opened)
    parses = form.reasoning is not None or tools.schemas is not None
    if parses and form.has_special_markers(llm.tokenizer):
        sampling.setdefault("skip_special_tokens", False)
    params = SamplingParams.from_model(llm, chat=True, **sampling, adapter=adapter)
    stream = llm.generate(prompt.token_ids, params, deadline=limits.timeout)
    remember = None  # the template writes a forced call in another form
    if tools.forced is None:
        remember = functools.partial(_remember, model.turns, prompt.key, prompt.text, make_parser)
    return ChatAnswer(stream, make_parser if parses else None, tools.parallel, llm.tokenizer, form, remember)


def _remember(
    turns: TurnMemory, key: bytes, prompt: str, make_parser: Callable[[], AnswerParser], snapshot: RequestSnapshot
) -> None:
    """Keep an answer, if it is the only one."""
    completion = snapshot.completions[0]
    if len(snapshot.completions) == 1 and completion.num_tokens > len(snapshot.prompt_token_ids):
        token_ids = completion.sequence.token_ids[: completion.num_tokens]
        eos_ids = completion.sequence.request.eos_ids
        turns.remember(key, turn_of(prompt, token_ids, completion.text(), eos_ids, make_parser()))


def _constrained(chat: Chat, form: AnswerFormat, opened: bool) -> dict[str, Any]:
    """The options of `SamplingParams`, with the grammar of the answer, before which reasoning is free."""
    sampling, forced = dict(chat.sampling), chat.tools.constraint()
    if forced is not None and "structured_outputs" in sampling:
        raise BadRequestError("tool_choice and the response's format both give the answer's form.", param="tool_choice")
    constraint, budget = forced or sampling.get("structured_outputs"), chat.thinking_token_budget
    if budget is not None and form.tags is None:
        if form.reasoning is not None:
            raise BadRequestError(
                "thinking_token_budget: the model reasons in channels, and not between markers such as <think>.",
                param="thinking_token_budget",
            )
        budget = None  # it does not reason
    limit: dict[str, Any] = {} if budget is None else {"thinking_token_budget": budget}
    if form.tags is not None and (constraint is None or constraint.reasoning_tags is None):
        begin, end = form.tags
        limit["reasoning_tags"] = ("" if opened else begin, end)
    if constraint is not None:
        sampling["structured_outputs"] = dataclasses.replace(constraint, **limit)
    elif budget is not None:
        sampling["structured_outputs"] = StructuredOutputsParams(**limit)
    return sampling


def _effort(form: AnswerFormat, effort: str | None) -> dict[str, Any]:
    """The arguments of the template that say how much to reason. Raises BadRequestError."""
    if effort is None:
        return {}
    if "reasoning_effort" in form.switches:
        return {"reasoning_effort": effort}
    if switch := next((name for name in ("enable_thinking", "thinking") if name in form.switches), None):
        return {switch: effort != "none"}
    if effort == "none" and form.reasoning is not None:
        raise BadRequestError(
            "reasoning_effort=none: the model's chat template cannot turn reasoning off.", param="reasoning_effort"
        )
    return {}


def _reasoning_tokens(completion: CompletionSnapshot, parser: AnswerParser, tokenizer: Tokenizer) -> int:
    """Count the tokens of a completion with which reasoning begins, goes on or ends."""
    sequence, count = completion.sequence, 0
    start = len(sequence.request.prompt_token_ids)
    skip = sequence.request.sampling.skip_special_tokens
    stream = TextStream(tokenizer, sequence.request.prompt_token_ids, skip_special_tokens=skip)
    for token in sequence.token_ids[start : completion.num_tokens]:
        before = parser.in_reasoning
        parser.push(stream.push(token))
        count += before or parser.in_reasoning
    return count
