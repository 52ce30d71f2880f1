"""A process for each model, of which one runs at a time: stopped and started as `llama-swap` does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Self

from benchmarks.serving.processes import Server
from jaxinfer.evaluation.serving.client import CompletionClient, LoadRequest, RequestRecord


class ProcessSwap:
    """Starts the server of the model whose request has waited longest, once the running requests of another end.

    All requests that wait for a model run together, as in our server: what is compared is the swap.

    Args:
      start: starts the server of a model.
    """

    def __init__(self, start: Callable[[str], Server]):
        self._start = start
        self._server: Server | None = None
        self._client: CompletionClient | None = None
        self._current, self._running = "", 0
        self._waiting: list[tuple[str, asyncio.Event]] = []
        self._swapping: asyncio.Task[None] | None = None
        self.swaps = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._swapping is not None:
            await asyncio.wait([self._swapping])
        await self._stop()

    async def complete(self, name: str, request: LoadRequest, start: float) -> RequestRecord:
        """Run a request of a model."""
        async with self._turn(name):
            assert self._client is not None
            return await self._client.complete(request, start)

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        if name != self._current or self._waiting or self._swapping is not None:
            turn = asyncio.Event()
            self._waiting.append((name, turn))
            self._go_on()
            await turn.wait()
        else:
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._go_on()

    def _go_on(self) -> None:
        """Begin a swap if one is due: the oldest request is for another model, and none runs."""
        if self._swapping is None and not self._running and self._waiting:
            self._swapping = asyncio.create_task(self._swap(self._waiting[0][0]))

    async def _swap(self, name: str) -> None:
        if name != self._current:
            await self._stop()
            self._server = await asyncio.to_thread(self._start, name)
            await asyncio.to_thread(self._server.wait)
            self._client = CompletionClient(f"http://127.0.0.1:{self._server.port}")
            self._client.model = await self._client.find_model()
            self._current = name
            self.swaps += 1
        self._swapping = None
        begun = [turn for model, turn in self._waiting if model == name]
        self._waiting = [(model, turn) for model, turn in self._waiting if model != name]
        self._running += len(begun)
        for turn in begun:
            turn.set()

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        self._server = self._client = None
        self._current = ""
