"""Sends answers to a client for as long as it stays."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.http.errors import describe, encode_error

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


class EventStream(Response):
    """Server-sent events, sent one by one as they come. An error among them is sent as an event.

    Args:
      first: the first event.
      events: the other ones; closed at the end, or when the client leaves.
      ended: called after the last one.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes], ended: Callable[[], None]):
        self._first, self._events, self._ended = first, events, ended
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    @classmethod
    async def begin(cls, request: Request, events: AsyncGenerator[bytes], ended: Callable[[], None]) -> "EventStream":
        """Wait for the first event: an error before it is raised, so that the response has its status."""
        return cls(await until_disconnect(request.receive, anext(events)), events, ended)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all, unless the client leaves."""
        with contextlib.suppress(DisconnectedError):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                event = b"data: " + encode_error(describe(error)[1]) + b"\n\n" + DONE
                await send({"type": "http.response.body", "body": event, "more_body": True})
            else:
                self._ended()
        await send({"type": "http.response.body", "body": b""})
