"""`AsyncLLM`: one model for many threads and event loops at once."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, Unpack, overload

import numpy as np

from jaxinfer.fields import AtLeast1, NotNegative, Positive, SizeOrZero, check
from jaxinfer.generation.api.build import LoadOptions
from jaxinfer.generation.api.embedding import pooling_requests
from jaxinfer.generation.api.holder import EngineHolder
from jaxinfer.generation.api.loading import load_engine
from jaxinfer.generation.api.preparation import Kind, Preparation
from jaxinfer.generation.api.sleeping_holder import SleepingHolder
from jaxinfer.generation.engine.decider import RequestDecider
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.engine.request import Sequence as TokenSequence
from jaxinfer.generation.engine.stats import EngineStats
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.generation.engine.view import RequestSnapshot
from jaxinfer.generation.foreign_options import MODEL, refuses
from jaxinfer.generation.outputs import RequestOutput
from jaxinfer.generation.params import PoolingParams, SamplingParams
from jaxinfer.progress import ProgressOption, long_work, showing
from jaxinfer.serving.errors import FailedError
from jaxinfer.serving.future import TicketFuture
from jaxinfer.serving.loop import Loop
from jaxinfer.serving.served import Served
from jaxinfer.serving.ticket import Reader
from jaxinfer.text import Prompt, as_list, copied, require_tokenizer
from jaxinfer.text.chat_template import ChatOptions, Messages, check_messages, check_options, require_text


@refuses(MODEL)
class AsyncLLM(Served, SleepingHolder):
    """A model that takes requests from many tasks and threads, and runs them together in its own thread.

    Args:
      path: a model directory, or what stands for one, as in `LLM`; an encoder can only `embed`.
      max_requests: how many requests can be in flight, waiting or running; further callers wait until one has ended.
      max_waiting: how many callers may wait so; more are refused with OverloadedError. None: any number.
      max_queue_time: how many seconds a request may wait for a place in the batch. One that is expected to wait longer
        than half of them is refused with OverloadedError at once, one that has waited so long later. Those of the
        lowest priority (the largest `priority`) first. None: any time.
      compile_ahead: whether all programs are compiled before it takes requests, as servers and benchmarks want it, so
        that no request waits for one.
      trust_request_chat_template: whether `chat` takes the text of a template, which is code, from its callers.
      asleep: whether it begins as after `sleep(level=2)`: it takes no memory of the devices before `wake_up`.
      progress: as in `LLM`.
      options: those of `LLM`, for an encoder those of `Embedder`.

    The first request waits for the programs that it needs; after its answer, all others are compiled in the background.
    A request that needs some sooner waits for them, and they come next. If other requests are running, these wait, too,
    and `stats().compile_misses` counts the programs.

    Requests in flight keep it alive; without any, its thread ends when it is dropped or closed, or the process ends.

    A step that fails ends its own requests with FailedError, and the others go on. If the thread itself dies,
    every request ends with DiedError, and so does every later call. `Timings` count from when a request is in
    flight.

    Raises as `LLM` does.

    >>> async def main():
    ...     async with AsyncLLM("examples/demo_model") as llm:
    ...         async for piece in llm.generate("def main():").text():
    ...             print(piece, end="", flush=True)
    >>> asyncio.run(main())  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_requests: int = 1024,
        max_waiting: int | None = None,
        max_queue_time: float | None = None,
        compile_ahead: bool = False,
        trust_request_chat_template: bool = False,
        asleep: bool = False,
        progress: ProgressOption = None,
        **options: Unpack[LoadOptions],
    ):
        max_requests = check("AsyncLLM.max_requests", max_requests, AtLeast1)
        max_waiting = check("AsyncLLM.max_waiting", max_waiting, SizeOrZero | None)
        max_queue_time = check("AsyncLLM.max_queue_time", max_queue_time, Positive | None)
        compile_ahead = check("AsyncLLM.compile_ahead", compile_ahead, bool)
        self._trusts_templates = check("AsyncLLM.trust_request_chat_template", trust_request_chat_template, bool)
        asleep = check("AsyncLLM.asleep", asleep, bool)
        with showing(progress), long_work(f"loading {path}"):
            super().__init__(load_engine(path, owner="AsyncLLM", asleep=asleep, **options))
            if compile_ahead:
                self.engine.compile_ahead()
        self._preparation = Preparation()
        decider = RequestDecider(
            self.engine, max_requests=max_requests, max_waiting=max_waiting, max_queue_time=max_queue_time
        )
        self._loop, self._queue = decider.loop, decider.queue
        self._begin(decider, asleep=asleep)
        self._loop.stop_when_dropped(self)

    def prepare(
        self,
        prompt: Prompt | Request,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Tokenise and check a prompt. Pass the request, with its `request_id`, instead of the prompt.

        Args:
          prompt: the prompt.
          sampling_params: how to continue it, or PoolingParams to embed it; None: as in `SamplingParams.from_model`.
          request_id: your own name for the request; None: a new one.

        Raises the ValueError that they would raise for this prompt. A grammar may take 5 s and 256 MB.
        """
        engine = self.engine
        if isinstance(sampling_params, SamplingParams) and sampling_params.structured_outputs is not None:
            with self._end_errors():
                self._preparation.check_grammar(sampling_params.structured_outputs)
        return engine.prepare(prompt, sampling_params, request_id=request_id)

    def check_room(self, priority: int = 0) -> None:
        """Raise OverloadedError if a request of this priority would be refused, before anything is done for it."""
        self._loop.check_process()
        with self._loop.lock:
            self._queue.check(priority, self._loop.in_line, self.engine.scheduler.load)

    @contextlib.contextmanager
    def _end_errors(self) -> Iterator[None]:
        """Raise the error of the end for what closed sandboxes and threads raise."""
        try:
            yield
        except RuntimeError as error:
            if self._loop.is_running:
                raise
            raise self._end_error() from error

    # Tasks

    def generate(
        self,
        prompt: Prompt | Request,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        deadline: float | None = None,
    ) -> "OutputStream":
        """Generate a continuation. Iterate over outputs or text with `async for`, or await the final output.

        Args:
          prompt: the prompt.
          sampling_params: how to continue it; None: as in `SamplingParams.from_model`.
          request_id: names the request for `abort` and in its outputs; no other in flight may have it.
          deadline: seconds from the first reading within which it must have ended, the time that it waits included.
            Then it is given up, once the running step has ended, and reading raises DeadlineExceededError, whose
            `output` is what there is; None: any.

        The request is made in a thread beside the event loop and begins when the stream is first read, which raises
        ValueError for an invalid prompt, and OverloadedError if `max_waiting` requests wait. If the reading task is
        cancelled, or closes or drops the stream, the request is given up.
        """
        prompt = copied(prompt)  # the caller's list may change until the stream is read
        params = prompt.params if isinstance(prompt, Request) else sampling_params
        priority = 0 if params is None else params.priority
        return self._stream(lambda: self._sequences(prompt, sampling_params, request_id), deadline, priority)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        deadline: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> "OutputStream":
        """Generate the next message like `LLM.chat`, streamed like `generate`, whose `deadline` it takes.

        Chat templates run in a process of their own, which may take 5 s and 256 MB more than at its start.

        Raises ValueError at once for an invalid conversation, and for a template of its own unless this AsyncLLM
        trusts those; when the stream is read, for one that the chat template cannot take.
        """
        params = SamplingParams.from_model(self, chat=True) if sampling_params is None else sampling_params
        encode = self._chat_encoder(messages, options)

        async def sequences() -> list[TokenSequence]:
            return await self._sequences(await encode(), params, request_id)

        return self._stream(sequences, deadline, params.priority)

    async def encode_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        """Return the token ids of a conversation, as `chat` gives them to the model. Raises as it does."""
        return await self._chat_encoder(messages, options)()

    async def render_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> str:
        """Return the text of a conversation, of which `encode_chat` makes tokens. Raises as `chat` does."""
        kind, render = self._chat_renderer(messages, options)
        return await self._prepare(kind, render)

    def _chat_encoder(self, messages: Messages, options: ChatOptions) -> Callable[[], Awaitable[list[int]]]:
        """Check a conversation; return what encodes it."""
        kind, render = self._chat_renderer(messages, options)
        return lambda: self._prepare(kind, lambda: require_tokenizer(self.tokenizer).encode_word(render()))

    def _chat_renderer(self, messages: Messages, options: ChatOptions) -> tuple[Kind, Callable[[], str]]:
        """Check a conversation; return what renders it, with its template in a process of its own."""
        messages, options = check_messages(messages), check_options(options)
        require_text(messages)
        templates = require_tokenizer(self.tokenizer).chat_templates
        given = templates.is_text(options.get("chat_template"))
        if given and not self._trusts_templates:
            raise ValueError(
                "chat_template is the text of a template, which is code: name one of the model's templates, or make "
                "the AsyncLLM with trust_request_chat_template=True."
            )
        kind = Kind.GIVEN_TEMPLATE if given else Kind.CHAT
        renderer = self._preparation.renderer(kind)
        return kind, lambda: templates.render(messages, renderer=renderer, **options)

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: str | None = None,
        prompt: str | None = None,
        truncate: bool = True,
        deadline: float | None = None,
    ) -> np.ndarray:
        """Embed texts as `Embedder.embed` does: float32 [texts, D].

        Args:
          texts: one or several texts or lists of token ids.
          adapter: as in `Embedder.embed`.
          prompt: as in `Embedder.embed`.
          truncate: as in `Embedder.embed`.
          deadline: seconds within which all must have ended; None: any.

        Raises ValueError for an invalid text, naming it, before anything runs; FailedError if a step fails;
        OverloadedError if `max_waiting` requests wait; DeadlineExceededError.
        """
        until = self._until(deadline)
        width = self.model.transformer.output_width
        options = {"adapter": adapter, "prompt": prompt, "truncate": truncate}
        prepare = functools.partial(pooling_requests, self.engine, as_list(texts), **options)
        requests = await self._prepare(Kind.PROMPT, prepare)
        reader = Reader()
        pending = [  # texts may wait for others of the same call
            RequestTicket(request.sequences(), owner=self, reader=reader, deadline=until, limited=not index)
            for index, request in enumerate(requests)
        ]
        vectors = []
        with self._running(*pending):
            for index, request in enumerate(pending):
                try:
                    vectors.append(await request.wait())
                except FailedError as error:
                    raise FailedError(f"Text {index}: {error}") from error
        return np.array(vectors, np.float32).reshape(-1, width)

    async def _prepare[Result](self, kind: Kind, function: Callable[[], Result]) -> Result:
        """Call a part of a request's preparation in a thread of its kind."""
        self._loop.check_process()
        with self._end_errors():
            return await asyncio.wrap_future(self._preparation.submit(kind, function))

    async def _sequences(
        self, prompt: Prompt | Request, params: SamplingParams | None, request_id: str | None
    ) -> list[TokenSequence]:
        """Prepare a request; return its sequences."""
        kind = Kind.PROMPT
        if isinstance(params, SamplingParams) and (grammar := params.structured_outputs) is not None:
            quick = await self._prepare(Kind.GRAMMAR, lambda: self._preparation.is_quick(grammar))
            kind = Kind.GRAMMAR if quick else Kind.SLOW_GRAMMAR
        return await self._prepare(kind, lambda: self.prepare(prompt, params, request_id).sequences())

    def _stream(
        self, sequences: Callable[[], Awaitable[list[TokenSequence]]], deadline: float | None, priority: int
    ) -> "OutputStream":
        reader = Reader()
        return OutputStream(self._snapshots(sequences, reader, _checked(deadline), priority), reader)

    def _until(self, deadline: float | None) -> float | None:
        """Return when a deadline that begins now passes, on the loop's clock. Raises ValueError."""
        deadline = _checked(deadline)
        return None if deadline is None else self._loop.clock() + deadline

    async def _snapshots(
        self,
        sequences: Callable[[], Awaitable[list[TokenSequence]]],
        reader: Reader[RequestSnapshot],
        deadline: float | None,
        priority: int,
    ) -> AsyncGenerator[RequestSnapshot]:
        until, seen = self._until(deadline), None
        self.check_room(priority)  # before it is prepared: refusals must be cheap
        pending = RequestTicket(await sequences(), owner=self, reader=reader, deadline=until)
        with self._running(pending):
            while pending.outcome is None:
                await reader.wait()
                if pending.outcome is None and reader.newest is not seen:
                    seen = reader.newest
                    assert seen is not None
                    yield seen
            yield await pending.wait()

    @contextlib.contextmanager
    def _running(self, *pending: RequestTicket) -> Iterator[None]:
        """Run requests while a task reads them; they are given up if the task leaves before their end.

        Not asynchronous: an event loop that ends closes all asynchronous generators in any order, this one before the
        stream that uses it.
        """
        try:
            for request in pending:
                assert request.reader is not None
                request.reader.attach()
                self._loop.submit(request, block=True)
            yield
        finally:
            for request in pending:
                self._loop.cancel(request)

    # Threads

    @overload
    def submit(
        self,
        prompt: Prompt | Request,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        deadline: float | None = None,
        block: bool = True,
    ) -> TicketFuture[RequestOutput]: ...

    @overload
    def submit(
        self,
        prompt: Prompt,
        sampling_params: PoolingParams,
        request_id: str | None = None,
        *,
        deadline: float | None = None,
        block: bool = True,
    ) -> TicketFuture[np.ndarray]: ...

    def submit(
        self,
        prompt: Prompt | Request,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        deadline: float | None = None,
        block: bool = True,
    ) -> TicketFuture[Any]:
        """Generate, or embed with PoolingParams, from any thread. Cancel the future to cancel.

        Args:
          prompt: as in `generate`.
          sampling_params: as in `generate`.
          request_id: as in `generate`.
          deadline: seconds within which it must have ended; else the future's error is a DeadlineExceededError.
          block: whether to wait while `max_requests` are in flight, or to raise OverloadedError.

        The future's callbacks run in a thread of the engine, one after the other: one that blocks delays other
        callbacks, but no results.

        A coroutine should `generate` instead.

        Raises ValueError for an invalid prompt; OverloadedError also if `max_waiting` requests wait.
        """
        until = self._until(deadline)
        sequences = self.prepare(prompt, sampling_params, request_id).sequences()
        ticket = RequestTicket(sequences, owner=self, deadline=until)
        return self._loop.serve(ticket, block=block)

    def abort(self, request_id: str) -> None:
        """Cancel a request from any thread. It ends with the tokens it has and FinishReason.ABORT."""
        if (ticket := self._loop.find(request_id)) is not None:
            self._loop.cancel(ticket)

    def stats(self) -> EngineStats:
        """Return what the engine holds and has done so far, and how requests have ended; from any thread.

        Callers that wait beyond `max_requests` count as waiting.
        """
        stats = super().stats()
        if self._loop.is_running:
            stats = self._queue.with_waiting(stats, self._loop)
        return dataclasses.replace(stats, requests=self._loop.stats())

    @property
    def _serving_loop(self) -> Loop[RequestTicket]:
        return self._loop

    # The end

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Refuse new requests, end the engine's thread and free all memory. May be called repeatedly.

        Requests in flight end with ClosedError: at once, or with `drain` only those that need more than `timeout`
        seconds. In a coroutine, `async with` closes without blocking the event loop.

        Raises DiedError if a step hangs, rather than wait for ever; ValueError for another timeout.
        """
        super().close(drain=drain and not self.is_sleeping, timeout=timeout)

    def _free(self) -> None:
        self._preparation.close()
        EngineHolder._free(self)  # the decider has closed the engine

    def _end_error(self) -> Exception:
        return self._loop.end_error()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of a request, for one task: `async for` yields its output so far each time it has grown.

    The output so far is copied each time. In long texts, `deltas` and `text` are faster: they yield only what is new.

    A slow task gets the newest output, which includes those it has missed. Raises FailedError if the request fails,
    and ClosedError or DiedError if the engine ends.

    Attributes:
      snapshots: the request's progress; a server makes of it what it sends, without making outputs.
    """

    def __init__(self, snapshots: AsyncGenerator[RequestSnapshot], reader: Reader[RequestSnapshot]):
        self.snapshots, self._reader = snapshots, reader
        self._newest: RequestSnapshot | None = None

    async def __anext__(self) -> RequestOutput:
        self._newest = await anext(self.snapshots)
        return self._newest.output()

    async def deltas(self) -> AsyncGenerator[RequestOutput]:
        """Yield outputs whose `text`, `token_ids`, `logprobs` and `prompt_logprobs` are only the new ones.

        The first has all so far. The sums (timings, `cumulative_logprob`, counts of tokens) are of the output so far.
        """
        seen = None
        async with contextlib.aclosing(self):
            async for snapshot in self.snapshots:
                self._newest = snapshot
                yield snapshot.output(since=seen)
                seen = snapshot

    async def text(self) -> AsyncGenerator[str]:
        """Yield pieces of the text as they come. Raises ValueError for a request of several completions."""
        seen = None
        async with contextlib.aclosing(self):
            async for snapshot in self.snapshots:
                self._newest = snapshot
                if (count := len(snapshot.completions)) > 1:
                    raise ValueError(f"A stream of text needs SamplingParams.n=1, got {count}.")
                completion = snapshot.completions[0]
                if text := completion.text(since=seen):
                    yield text
                seen = completion

    async def final(self) -> RequestOutput:
        """Wait for the final output, without making those before it."""
        return (await self.last()).output()

    async def last(self) -> RequestSnapshot:
        """Wait for the last snapshot."""
        self._reader.final_only = True
        async for snapshot in self.snapshots:
            self._newest = snapshot
        if self._newest is None:
            raise RuntimeError("The stream was closed before its first output.")
        return self._newest

    async def aclose(self) -> None:
        """Give the request up, unless it has ended."""
        await self.snapshots.aclose()


def _checked(deadline: object) -> float | None:
    return check("deadline", deadline, NotNegative | None)
