"""The process of `jaxinfer serve`: it loads its models in a thread, and drains before it ends."""

import asyncio
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import uvicorn

from jaxinfer.http import records
from jaxinfer.http.config import ServerConfig
from jaxinfer.http.draining import Drain
from jaxinfer.http.loading import load_models, served_models
from jaxinfer.http.server import make_app
from jaxinfer.http.vision.loading import vision_of

if TYPE_CHECKING:
    from jaxinfer.http.kv_events import KVEvents

LAST_SECONDS = 1.0
"""Seconds for clients to read the end of their responses, once no request runs."""
SWITCH_SECONDS = 5e-4
"""Seconds that a thread may keep Python's lock (GIL).

After each system call, the event loop waits for it. At the default of 5 ms, it would wait so long while the engine's
thread runs Python, and hundreds of refusals a second would take a second each.
"""


def serve(
    config: ServerConfig, listening: socket.socket, *, access_log: TextIO | None, ready: Callable[[], None]
) -> None:
    """Serve models until SIGTERM or SIGINT, and their requests have ended.

    Args:
      listening: the socket that listens on the config's address.
      access_log: a file that gets a line of JSON for each request; None: none.
      ready: called in another thread once all models are loaded.

    Raises what `AsyncLLM` raises for a model that cannot be loaded; ValueError, naming the file, for one of a file;
    KeyboardInterrupt for a second SIGINT, or one while models are being loaded.
    """
    events = _kv_events(config)
    models = served_models(config, events)
    systems, services = vision_of(config)
    with _sinks(config, access_log) as sinks, short_turns(), events or nullcontext():
        app = make_app(
            models,
            config.limits,
            sinks,
            systems=systems,
            services=services,
            keep_billing_header=config.keep_billing_header,
        )
        server = _Server(app, app.state.drain, config.drain_timeout)
        errors: list[BaseException] = []

        def load() -> None:
            try:
                load_models(config, models)
                for each in (*systems, *services):
                    each.load()
                freeze()
                ready()
            except BaseException as error:
                errors.append(error)
                server.should_exit = True

        loading = threading.Thread(target=load, name="jaxinfer-loading", daemon=True)  # the process ends without it
        loading.start()
        server.run(sockets=[listening])
    if errors:
        raise errors[0]
    if server.was_hurried or loading.is_alive():  # the command line ends what still compiles
        signal.raise_signal(server.signals[-1])


@contextmanager
def _sinks(config: ServerConfig, access_log: TextIO | None) -> Iterator[list[records.Sink]]:
    """Open what takes the records of requests."""
    sinks = [] if access_log is None else [records.access_log(access_log)]
    if config.otlp_endpoint is None:
        yield sinks
        return
    from jaxinfer.http.traces import Traces  # of another extra

    traces = Traces(config.otlp_endpoint)
    try:
        yield [*sinks, traces]
    finally:
        traces.close()


def _kv_events(config: ServerConfig) -> "KVEvents | None":
    """Begin to publish KV events, if the config says so. Raises ValueError."""
    if config.kv_events is None:
        return None
    from jaxinfer.http.kv_events import KVEvents  # of another extra

    (name,) = config.models
    return KVEvents(config.kv_events, name, host=config.host, port=config.port)


@contextmanager
def short_turns() -> Iterator[None]:
    """Let threads keep Python's lock for SWITCH_SECONDS only."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def freeze() -> None:
    """Keep garbage collections from looking at what lives now, JAX among it: all streams would stop for 0.1 s."""
    gc.collect()
    gc.freeze()


class _Server(uvicorn.Server):
    """Drains at the first SIGTERM or SIGINT; a second SIGINT ends what still runs.

    Attributes:
      signals: the signals that came.
      was_hurried: whether the second SIGINT was among them.
    """

    def __init__(self, app: Any, drain: Drain, drain_seconds: float):
        super().__init__(
            uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        )
        self._drain, self._seconds = drain, drain_seconds
        self.signals: list[int] = []
        self._draining: asyncio.Task[None] | None = None
        self.was_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal."""
        self.signals.append(sig)
        if len(self.signals) > 1 and sig == signal.SIGINT:
            self.was_hurried = True
            self._drain.hurry()
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one ends the process at once

    async def on_tick(self, counter: int) -> bool:
        """Begin to drain after a signal; called ten times a second."""
        if self.signals and self._draining is None:
            self._draining = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        try:
            await self._drain.run(self._seconds)
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=LAST_SECONDS)
            self._disconnect_readers()
        finally:
            self.should_exit = True

    def _disconnect_readers(self) -> None:
        """Disconnect clients that do not read the end of their responses."""
        for connection in list(self.server_state.connections):
            cycle: Any = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                connection.transport.abort()
