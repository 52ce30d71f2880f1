"""Sends answers to a client for as long as it stays."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.http.errors import describe, encode_error
from jaxinfer.http.records import SEND

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


class DisconnectedError(Exception):
    """The client has left."""


async def until_disconnect[Result](receive: Receive, work: Awaitable[Result]) -> Result:
    """Wait for work; cancel it and raise DisconnectedError when the client leaves."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DisconnectedError
        return task.result()
    finally:
        for each in (task, left):
            each.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_events(error: Exception) -> bytes:
    """The last events of a stream that fails, as the OpenAI API writes them."""
    return b"data: " + encode_error(describe(error)[1]) + b"\n\n" + DONE


class EventStream[Item](Response):
    """Server-sent events, sent one by one as they come. An error among them is sent as an event.

    Args:
      items: what events are made of; closed at the end, or when the client leaves.
      event: makes an event of an item; None: nothing to send.
      last: makes the last events.
      error: makes the last events of a stream that fails.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        items: AsyncGenerator[Item],
        event: Callable[[Item], bytes | None],
        last: Callable[[], Awaitable[bytes]],
        error: Callable[[Exception], bytes] = error_events,
    ):
        self._items, self._event, self._last, self._error = items, event, last, error
        self._first = b""
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    async def begin(self, receive: Receive) -> Self:
        """Wait for the first event: an error before it is raised, so that the response has its status."""
        await until_disconnect(receive, self._begin())
        return self

    async def _begin(self) -> None:
        async for item in self._items:
            if event := self._event(item):
                self._first = event
                break

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all, unless the client leaves."""
        with contextlib.suppress(DisconnectedError):
            await until_disconnect(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        part, make = scope[SEND], self._event
        async with contextlib.aclosing(self._items):
            await part({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for item in self._items:
                    if event := make(item):
                        await part({"type": "http.response.body", "body": event, "more_body": True})
                last = await self._last()
            except Exception as error:
                last = self._error(error)
        await part({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
