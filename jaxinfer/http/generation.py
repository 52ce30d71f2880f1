"""`/v1/completions` and `/v1/chat/completions`."""

import abc
import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxinfer.generation.api.async_llm import AsyncLLM, OutputStream
from jaxinfer.generation.outputs import RequestOutput
from jaxinfer.generation.params import SamplingParams
from jaxinfer.http.answers import LogprobForms, finish_reason, usage_of
from jaxinfer.http.bodies import ChatBody, CompletionBody, GenerationBody, as_prompts
from jaxinfer.http.errors import describe, encode_error
from jaxinfer.http.limits import Limits

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """A server-sent event with this JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class Reply(abc.ABC):
    """The way of one request from its streams to the client.

    Args:
      llm: the model.
      body: the request.
      model: the model's name, as the client gave it.
      streams: the outputs of each prompt.

    Attributes:
      outputs: the newest output of each prompt, by its place.
    """

    prefix: str
    object: str
    chunk: str

    def __init__(self, llm: AsyncLLM, body: GenerationBody, model: str, streams: Sequence[OutputStream]):
        self.body, self.model, self.streams = body, model, streams
        self._options, self.outputs = body.check_stream_options(), dict[int, RequestOutput]()
        self.logprobs = LogprobForms(llm.tokenizer)
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    @abc.abstractmethod
    def choices(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of a prompt's complete output. place: the prompt's."""

    @abc.abstractmethod
    def deltas(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of a chunk, of an output that has only what is new."""

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    async def whole(self) -> dict[str, Any]:
        """Wait for all outputs; return the answer."""
        with one_error():
            async with asyncio.TaskGroup() as tasks:
                finals = [tasks.create_task(stream.final()) for stream in self.streams]
        outputs = [task.result() for task in finals]
        self.outputs = dict(enumerate(outputs))
        choices = [choice for place, output in enumerate(outputs) for choice in self.choices(place, output)]
        usage = usage_of(outputs, [sum(len(each.token_ids) for each in output.outputs) for output in outputs])
        return self._envelope(self.object, choices) | {"usage": usage}

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the chunks of a stream. What is raised before the first one is no event."""
        options, newest = self._options, self.outputs
        counts = [0] * len(self.streams)
        async with contextlib.aclosing(_merged(self.streams)) as outputs:
            async for place, output in outputs:
                newest[place] = output
                counts[place] += sum(len(each.token_ids) for each in output.outputs)
                if choices := self.deltas(place, output):
                    chunk = self._envelope(self.chunk, choices)
                    if options.continuous_usage_stats:
                        chunk["usage"] = usage_of(list(newest.values()), counts)
                    yield event(chunk)
        if options.include_usage:
            yield event(self._envelope(self.chunk, []) | {"usage": usage_of(list(newest.values()), counts)})
        yield DONE


class CompletionReply(Reply):
    """The answer of `/v1/completions`."""

    prefix, object, chunk = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._lengths: dict[tuple[int, int], int] = {}  # characters of each text so far

    def _prompt(self, output: RequestOutput) -> str:
        return self.logprobs.decode(output.prompt_token_ids) if output.prompt is None else output.prompt

    def choices(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of a prompt, in order."""
        return self._make(place, output)

    def deltas(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices that have something new."""
        return [x for x in self._make(place, output) if x["text"] or x["finish_reason"] or x["logprobs"]]

    def _make(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        made = []
        for completion in output.outputs:
            index = place * len(output.outputs) + completion.index
            key, text = (place, completion.index), completion.text
            tokens, entries = completion.token_ids, list[Any](completion.logprobs or [])
            offset = self._lengths.get(key, 0)
            if self.body.echo and key not in self._lengths:
                text = self._prompt(output) + text
                tokens, entries = output.prompt_token_ids + tokens, [*(output.prompt_logprobs or []), *entries]
            self._lengths[key] = offset + len(text)
            logprobs = None
            if self.body.logprobs is not None:
                logprobs = self.logprobs.of_completion(tokens, entries, offset)
            made.append(
                {
                    "index": index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason(completion),
                    "stop_reason": completion.stop_reason,
                }
            )
        return made


class ChatReply(Reply):
    """The answer of `/v1/chat/completions`."""

    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._begun: set[int] = set()

    def choices(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The messages of all completions, in order."""
        return [
            {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": self.logprobs.of_chat(completion.logprobs or []) if self.body.logprobs else None,
                "finish_reason": finish_reason(completion),
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ]

    def deltas(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices that have something new; the first of each names the role."""
        made = []
        for completion in output.outputs:
            delta: dict[str, Any] = {}
            if completion.index not in self._begun:
                self._begun.add(completion.index)
                delta["role"] = "assistant"
            if completion.text or "role" in delta:
                delta["content"] = completion.text
            if delta or completion.finish_reason or completion.logprobs:
                made.append(
                    {
                        "index": completion.index,
                        "delta": delta,
                        "logprobs": self.logprobs.of_chat(completion.logprobs or []) if self.body.logprobs else None,
                        "finish_reason": finish_reason(completion),
                        "stop_reason": completion.stop_reason,
                    }
                )
        return made


async def _merged(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Yield the deltas of all streams as they come, each with its stream's place."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0].deltas()) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue(len(streams))

    async def read(place: int, stream: OutputStream) -> None:
        async for output in stream.deltas():
            await queue.put((place, output))

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
    return CompletionReply(llm, body, model, streams)


def chat_reply(llm: AsyncLLM, body: ChatBody, model: str, adapter: str | None, limits: Limits) -> Reply:
    """Begin a chat's request. Raises BadRequestError, ValueError."""
    params = SamplingParams.from_model(llm, chat=True, **body.params(), adapter=adapter)
    stream = llm.chat(body.messages, params, deadline=limits.timeout, **body.template_options())
    return ChatReply(llm, body, model, [stream])


async def respond(request: Request, reply: Reply, ended: Callable[[], None]) -> Response:
    """Reply a request, whole or as a stream; it is given up when the client leaves. ended: called at its end."""
    if not reply.body.stream:
        content = await until_disconnect(request, reply.whole())
        ended()
        return Response(msgspec.json.encode(content), media_type="application/json")
    events = reply.events()
    first = await until_disconnect(request, anext(events))  # an error before it has a status
    return StreamingResponse(
        _rest(first, events, ended), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _rest(first: bytes, events: AsyncGenerator[bytes], ended: Callable[[], None]) -> AsyncGenerator[bytes]:
    """Yield the events of a stream; an error is the last one."""
    async with contextlib.aclosing(events):
        yield first
        try:
            async for each in events:
                yield each
        except Exception as error:
            yield b"data: " + encode_error(describe(error)[1]) + b"\n\n"
            yield DONE
        else:
            ended()


@contextlib.contextmanager
def one_error() -> Iterator[None]:
    """Raise the first error of a group of tasks: a client gets one."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class DisconnectedError(Exception):
    """The client has left."""


async def until_disconnect[Result](request: Request, work: Awaitable[Result]) -> Result:
    """Wait for work; cancel it and raise DisconnectedError when the client leaves."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DisconnectedError
        return task.result()
    finally:
        for each in (task, left):
            each.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
