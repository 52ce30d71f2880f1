"""The end of a server: it takes no more requests, and those that run may end."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer.http.error_responses import error_response
from jaxinfer.serving import ClosedError

ALWAYS = ("/health", "/metrics", "/version")
"""Paths that are answered until the end, and that nobody waits for."""


class Drain:
    """The requests that run, and whether more are taken.

    Args:
      give_up: ends the requests that run.
    """

    def __init__(self, give_up: Callable[[], Awaitable[None]]):
        self._give_up = give_up
        self._num_running = 0
        self._changed = asyncio.Event()
        self.is_on = self._hurry = False

    def hurry(self) -> None:
        """Wait for requests no longer."""
        self._hurry = True
        self._changed.set()

    async def run(self, seconds: float) -> bool:
        """Take no more requests, and wait for those that run; return whether they have ended in time.

        The others end with an error.
        """
        self.is_on = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle()
        except TimeoutError:
            self._hurry = True
        if not self._num_running:
            return True
        await self._give_up()
        return False

    async def _idle(self) -> None:
        while self._num_running and not self._hurry:
            self._changed.clear()
            await self._changed.wait()

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application: new requests get 503 while it drains."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in ALWAYS:
                await app(scope, receive, send)
            elif self.is_on:
                await _refusal(scope)(scope, receive, send)
            else:
                self._num_running += 1
                try:
                    await app(scope, receive, send)
                finally:
                    self._num_running -= 1
                    self._changed.set()

        return serve


def _refusal(scope: Scope) -> Response:
    if scope["path"] == "/ready":
        return Response(status_code=503)
    return error_response(ClosedError("The server is shutting down; try another one."), scope)
