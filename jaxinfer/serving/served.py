"""The base of all services: they share one vocabulary."""

import abc
from typing import Any

from jaxinfer.serving.lifecycle import Closeable, check_timeout
from jaxinfer.serving.loop import Loop


class Served(Closeable):
    """A service of requests from any thread and event loop.

    `submit` returns a request's future. It raises at once for a request that cannot be served, OverloadedError if too
    many wait, ClosedError and DiedError. A thread calls `future.result()`, a coroutine awaits the future; to cancel
    either withdraws the request. `deadline=` counts seconds from then. `stats()` counts how requests have ended.
    """

    @property
    @abc.abstractmethod
    def _serving_loop(self) -> Loop[Any] | None:
        """The loop that serves; None before it has begun."""

    @abc.abstractmethod
    def _free(self) -> None:
        """Give all memory back, once the loop has ended; may be called again."""

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted: False after `close`, or if the service has died."""
        return self._serving_loop is None or self._serving_loop.is_running

    @property
    def num_requests(self) -> int:
        """The number of requests that have not ended, running or waiting."""
        return 0 if self._serving_loop is None else self._serving_loop.num_tickets

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Close the service (see `Closeable`); new requests are refused. Raises DiedError if work hangs."""
        timeout = check_timeout(timeout)
        try:
            if self._serving_loop is not None:
                self._serving_loop.close(drain=drain, timeout=timeout)
        finally:
            self._free()
