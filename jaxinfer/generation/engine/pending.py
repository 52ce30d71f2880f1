"""A request between its caller, in any thread or event loop, and the thread that steps the engine."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxinfer.compiled import end_future
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.engine.view import RequestSnapshot, RequestView
from jaxinfer.generation.outputs import FinishReason, RequestOutput


class EngineGenerateError(RuntimeError):
    """A request has ended with an error; others go on.

    Attributes:
      output: what had come of it, with each completion's error; None for a request for a vector.
    """

    def __init__(self, message: str, output: RequestOutput | None = None):
        super().__init__(message)
        self.output = output


class OutputReader:
    """Where one task reads what becomes of its requests; the engine's thread writes.

    It holds the newest snapshot of a stream alone, and the task makes an output of it. Each says all that came before
    it, so that a task slower than the engine skips some and loses nothing, holds nobody up, and lets nothing grow.

    Attributes:
      loop: the task's event loop, which is told of changes; known from `attach` on.
      newest: how far the request has come; None before the first token.
      final_only: whether the task wants none but the last output.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.newest: RequestSnapshot | None = None
        self.final_only = False
        self._changed = asyncio.Event()
        self._told = False  # the loop knows of a change that the task has not looked at yet

    def attach(self) -> None:
        """Read in the event loop that runs now."""
        self.loop = asyncio.get_running_loop()

    def must_tell(self) -> bool:
        """Whether the loop must be told of a change just made, which it then must be. In the engine's thread."""
        if self._told:  # and the task will find this change too: it forgets that it was told before it looks
            return False
        self._told = True
        return True

    def wake(self) -> None:
        """Tell of a change; in the loop's thread."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait for a change; there may be none after all."""
        await self._changed.wait()
        self._changed.clear()
        self._told = False


class PendingRequest:
    """A request that has not ended.

    Attributes:
      sequences: its completions, which belong to the engine's thread.
      reader: for the task that waits for it, which may wait for others with the same; None for callers in threads.
      future: for callers in threads: ends once, as `outcome` says, or cancelled by its caller; None beside a reader.
      outcome: a RequestOutput or a vector, or an error; None until it has ended.
      owner: what must live until the request has ended.
    """

    def __init__(self, sequences: list[Sequence], *, owner: object, reader: OutputReader | None = None):
        self.sequences, self.owner, self.reader = sequences, owner, reader
        self.future: Future[Any] | None = Future() if reader is None else None
        self.outcome: RequestOutput | np.ndarray | Exception | None = None
        self._view = None if sequences[0].request.pooling else RequestView(sequences)
        self._num_tokens = sum([len(sequence.token_ids) for sequence in sequences])

    @property
    def request_id(self) -> str:
        return self.sequences[0].request_id

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(sequence.finished for sequence in self.sequences)

    def advance(self) -> bool:
        """Give the reader a snapshot, if it wants one and there are new tokens; returns whether it got one."""
        if self.reader is None or self.reader.final_only or self._view is None:
            return False
        count = sum([len(sequence.token_ids) for sequence in self.sequences])
        if count == self._num_tokens:  # a part of the prompt was computed
            return False
        self._num_tokens = count
        self.reader.newest = self._view.snapshot()
        return True

    def result(self) -> RequestOutput | np.ndarray | EngineGenerateError:
        """What has come of a request whose completions have ended."""
        output = None if self._view is None else self._view.output()
        for sequence in self.sequences:
            if sequence.finish_reason is FinishReason.ERROR:
                return EngineGenerateError(str(sequence.error), output)
        if output is not None:
            return output
        vector = self.sequences[0].embedding
        if vector is None or self.sequences[0].finish_reason is FinishReason.ABORT:
            return EngineGenerateError("The request was aborted.")
        return vector

    def end(self, outcome: RequestOutput | np.ndarray | Exception) -> None:
        """Let callers know what has come of it."""
        self.outcome = outcome
        if self.future is not None:
            end_future(self.future, outcome, f"request {self.request_id}")

    async def wait(self) -> Any:
        """What has come of it, for the task that reads. Raises the error that it ended with."""
        assert self.reader is not None
        while self.outcome is None:
            await self.reader.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def tell_readers(changed: Iterable[PendingRequest]) -> list[str]:
    """Wake the tasks that wait for these requests, by one call for each event loop.

    Returns the ids of those whose loop is closed, so that nobody will read them.
    """
    loops: dict[asyncio.AbstractEventLoop, list[PendingRequest]] = defaultdict(list)
    for pending in changed:
        if pending.reader is not None:
            loops[pending.reader.loop].append(pending)
    unread = []
    for loop, requests in loops.items():
        if readers := [p.reader for p in requests if p.reader is not None and p.reader.must_tell()]:
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(_wake, readers)
        if loop.is_closed():
            unread += [pending.request_id for pending in requests]
    return unread


def _wake(readers: list[OutputReader]) -> None:
    for reader in readers:
        reader.wake()
