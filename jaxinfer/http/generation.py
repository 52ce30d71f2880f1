"""`/v1/completions` and `/v1/chat/completions`."""

import abc
import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.generation.api.async_llm import AsyncLLM, OutputStream
from jaxinfer.generation.engine.view import CompletionSnapshot, RequestSnapshot
from jaxinfer.generation.params import SamplingParams
from jaxinfer.http.answers import (
    CalledFunction,
    Completion,
    CompletionChoice,
    LogprobForms,
    Message,
    MessageCall,
    Usage,
    usage_of,
)
from jaxinfer.http.bodies import ChatBody, CompletionBody, GenerationBody, as_prompts
from jaxinfer.http.chats import Chat, ChatAnswer, CompletionParts, begin_chat
from jaxinfer.http.connection import DONE, EventStream, until_disconnect
from jaxinfer.http.limits import Limits
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.tools import Tools
from jaxinfer.text import Tokenizer
from jaxinfer.text.parsing import Part, ToolCall


class AnyReply(Protocol):
    """A reply of some API; `Reply` says what its members are."""

    model: str
    newest: dict[int, RequestSnapshot]
    usage: Usage | None

    @property
    def stream(self) -> bool: ...

    async def whole(self) -> bytes: ...

    def events(self, ended: Callable[[], None]) -> EventStream[Any]: ...


class Reply(abc.ABC):
    """The way of one request from its streams to the client.

    Args:
      body: the request.
      model: the model's name, as the client gave it.
      streams: the outputs of each prompt.
      tokenizer: the model's.

    Attributes:
      newest: the newest snapshot of each prompt, by its place.
      usage: the tokens of the whole request; None before its end.
    """

    prefix: str
    object: str
    chunk: str

    def __init__(self, body: GenerationBody, model: str, streams: Sequence[OutputStream], tokenizer: Tokenizer | None):
        self.body, self.model, self.streams = body, model, streams
        self._options, self.newest = body.check_stream_options(), dict[int, RequestSnapshot]()
        self.usage: Usage | None = None
        self.logprobs = LogprobForms(tokenizer)
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    @property
    def stream(self) -> bool:
        """Whether the client wants a stream."""
        return self.body.stream

    @abc.abstractmethod
    def whole_choice(self, index: int, completion: CompletionSnapshot) -> CompletionChoice:
        """A completion. index: its place among those of all prompts."""

    @abc.abstractmethod
    def delta(
        self, index: int, completion: CompletionSnapshot, seen: CompletionSnapshot | None
    ) -> CompletionChoice | None:
        """The new part of a completion since it was seen; None if nothing is new."""

    async def usage_at_end(self) -> Usage:
        """The usage of the whole request."""
        return usage_of(self.newest.values())

    def _answer(self, kind: str, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, object=kind, created=self.created, model=self.model, choices=choices)

    async def whole(self) -> bytes:
        """Wait for all outputs; return the answer as JSON."""
        with one_error():
            async with asyncio.TaskGroup() as tasks:
                ends = [tasks.create_task(stream.last()) for stream in self.streams]
        self.newest = {place: end.result() for place, end in enumerate(ends)}
        completions = [completion for snapshot in self.newest.values() for completion in snapshot.completions]
        answer = self._answer(self.object, [self.whole_choice(*each) for each in enumerate(completions)])
        answer.usage = self.usage = await self.usage_at_end()
        return msgspec.json.encode(answer)

    def events(self, ended: Callable[[], None]) -> EventStream[Any]:
        """The chunks of a stream. ended: called before the last one is sent."""
        chunk = self._answer(self.chunk, [])

        async def last() -> bytes:
            self.usage = await self.usage_at_end()
            ended()
            if not self._options.include_usage:
                return DONE
            chunk.choices, chunk.usage = [], self.usage
            return b"data: " + msgspec.json.encode(chunk) + b"\n\n" + DONE

        event = functools.partial(self._event, chunk)
        if len(self.streams) == 1:  # each token costs less than with `_merged`
            return EventStream(self.streams[0].snapshots, functools.partial(event, 0), last)
        return EventStream(_merged(self.streams), lambda each: event(*each), last)

    def _event(self, chunk: Completion, place: int, snapshot: RequestSnapshot) -> bytes | None:
        """A chunk with the new parts of a prompt's completions; None if nothing is new."""
        seen, self.newest[place] = self.newest.get(place), snapshot
        first, chunk.choices = place * len(snapshot.completions), []
        for number, completion in enumerate(snapshot.completions):
            before = None if seen is None else seen.completions[number]
            if (delta := self.delta(first + number, completion, before)) is not None:
                chunk.choices.append(delta)
        if not chunk.choices:
            return None
        if self._options.continuous_usage_stats:
            chunk.usage = usage_of(self.newest.values())
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class CompletionReply(Reply):
    """The answer of `/v1/completions`."""

    prefix, object, chunk = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def whole_choice(self, index: int, completion: CompletionSnapshot) -> CompletionChoice:
        """The text of a completion."""
        return self._choice(index, completion, None)

    def delta(
        self, index: int, completion: CompletionSnapshot, seen: CompletionSnapshot | None
    ) -> CompletionChoice | None:
        """The new text."""
        choice = self._choice(index, completion, seen)
        return choice if choice.text or choice.finish_reason or choice.logprobs else None

    def _choice(self, index: int, completion: CompletionSnapshot, seen: CompletionSnapshot | None) -> CompletionChoice:
        text, logprobs = completion.text(seen), None
        prompt = self._prompt(completion) if self.body.echo else ""
        if self.body.logprobs is not None:
            logprobs = self._logprobs(completion, seen, prompt)
        text = prompt + text if seen is None else text
        return CompletionChoice(index, completion.finish_reason, completion.stop_reason, logprobs, text=text)

    def _prompt(self, completion: CompletionSnapshot) -> str:
        request = completion.sequence.request
        return self.logprobs.decode(request.prompt_token_ids) if request.prompt is None else request.prompt

    def _logprobs(self, completion: CompletionSnapshot, seen: CompletionSnapshot | None, prompt: str) -> dict[str, Any]:
        new = completion.output(seen)
        tokens, entries = new.token_ids, list(new.logprobs or [])
        if self.body.echo and seen is None:
            sequence = completion.sequence
            tokens = list(sequence.request.prompt_token_ids) + tokens
            entries = sequence.prompt_logprobs[: completion.num_prompt_logprobs] + entries
        offset = 0 if seen is None else len(prompt) + len(seen.text())
        return self.logprobs.of_completion(tokens, entries, offset)


class ChatReply(Reply):
    """The answer of `/v1/chat/completions`."""

    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def __init__(self, body: ChatBody, model: str, answer: ChatAnswer):
        super().__init__(body, model, [answer.stream], answer.tokenizer)
        self._chat_answer = answer
        self._parts = dict[int, CompletionParts]()

    async def usage_at_end(self) -> Usage:
        """The usage of the whole request, with the tokens of its reasoning."""
        parts = [self._parts[index] for index in range(len(self.newest[0].completions))]
        return usage_of(self.newest.values(), await self._chat_answer.end(self.newest[0], parts))

    def whole_choice(self, index: int, completion: CompletionSnapshot) -> CompletionChoice:
        """The message of a completion."""
        parts = self._parts[index] = self._chat_answer.parts()
        message = self._message(index, parts.advance(completion), whole=True)
        message.role, message.refusal = "assistant", None
        if message.content is UNSET:
            message.content = None if parts.num_calls else ""
        choice = self._choice(index, completion, None)
        choice.message = message
        return choice

    def delta(
        self, index: int, completion: CompletionSnapshot, seen: CompletionSnapshot | None
    ) -> CompletionChoice | None:
        """The new parts; the first one names the role."""
        if seen is None:
            self._parts[index] = self._chat_answer.parts()
        new = self._parts[index].advance(completion, seen)
        choice = self._choice(index, completion, seen)
        if seen is not None and not (new or choice.finish_reason or choice.logprobs):
            return None
        choice.delta = self._message(index, new)
        if seen is None:
            choice.delta.role = "assistant"
            if choice.delta.content is UNSET:
                choice.delta.content = ""
        return choice

    def _message(self, index: int, parts: list[Part], *, whole: bool = False) -> Message:
        """A message of parts."""
        message, calls = Message(), []
        for part in parts:
            if isinstance(part, ToolCall):
                calls.append(part)
            elif part.kind == "content":
                message.content = part.text if not message.content else message.content + part.text
            elif self.body.include_reasoning is not False:
                text = part.text if not message.reasoning else message.reasoning + part.text
                message.reasoning = message.reasoning_content = text
        if calls:
            first = self._parts[index].num_calls - len(calls)
            message.tool_calls = [
                MessageCall(
                    index=UNSET if whole else first + place,
                    id=self._chat_answer.new_call_id(),
                    type="function",
                    function=CalledFunction(*call),
                )
                for place, call in enumerate(calls)
            ]
        return message

    def _choice(self, index: int, completion: CompletionSnapshot, seen: CompletionSnapshot | None) -> CompletionChoice:
        logprobs = None
        if self.body.logprobs:
            logprobs = self.logprobs.of_chat(completion.output(seen).logprobs or [])
        reason = self._parts[index].finish_reason(completion)
        return CompletionChoice(index, reason, completion.stop_reason, logprobs)


async def _merged(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestSnapshot]]:
    """Yield the snapshots of all streams as they come, each with its stream's place."""
    queue: asyncio.Queue[tuple[int, RequestSnapshot] | None] = asyncio.Queue(len(streams))

    async def read(place: int, stream: OutputStream) -> None:
        async with contextlib.aclosing(stream):
            async for snapshot in stream.snapshots:
                await queue.put((place, snapshot))

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for place, stream in enumerate(streams):
                    tasks.create_task(read(place, stream))
        finally:
            await queue.put(None)

    reading = asyncio.create_task(read_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        with one_error():
            await reading
    finally:
        reading.cancel()


def completion_reply(llm: AsyncLLM, body: CompletionBody, model: str, adapter: str | None, limits: Limits) -> Reply:
    """Begin a completion's requests. Raises BadRequestError, ValueError."""
    prompts = as_prompts("prompt", body.prompt, limits.max_prompts)
    params = SamplingParams.from_model(llm, **body.params(), adapter=adapter)
    streams = [llm.generate(prompt, params, deadline=limits.timeout) for prompt in prompts]
    return CompletionReply(body, model, streams, llm.tokenizer)


async def chat_reply(model: ServedModel, body: ChatBody, name: str, adapter: str | None, limits: Limits) -> Reply:
    """Begin a chat's request. Raises BadRequestError, ValueError; OverloadedError."""
    chat = Chat(
        messages=body.messages,
        tools=Tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False),
        sampling=body.params(),
        template=body.template_options(),
        reasoning_effort=body.reasoning_effort,
        thinking_token_budget=body.thinking_token_budget,
    )
    return ChatReply(body, name, await begin_chat(model, chat, adapter, limits))


async def respond(request: Request, reply: AnyReply, ended: Callable[[], None]) -> Response:
    """Reply a request, whole or as a stream; it is given up when the client leaves. ended: called at its end."""
    if reply.stream:
        return await reply.events(ended).begin(request.receive)
    content = await until_disconnect(request.receive, reply.whole())
    ended()
    return Response(content, media_type="application/json")


@contextlib.contextmanager
def one_error() -> Iterator[None]:
    """Raise the first error of a group of tasks: a client gets one."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
