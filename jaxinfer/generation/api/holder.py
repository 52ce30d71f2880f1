"""The base of `LLM`, `Embedder` and `AsyncLLM`: it holds a loaded engine until it is closed."""

import threading
import time

from jaxinfer.compiled import close_at_exit
from jaxinfer.generation.api.loading import LoadedEngine
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.stats import EngineStats
from jaxinfer.generation.execution.images import ImageEngine
from jaxinfer.generation.execution.memory import MemoryPlan
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.serving.budget import Budget
from jaxinfer.serving.errors import closed_error
from jaxinfer.serving.heap import trim_heap
from jaxinfer.serving.lifecycle import Closeable, check_timeout
from jaxinfer.streaming.config import Placement
from jaxinfer.streaming.statistics import StreamingStatistics
from jaxinfer.text import Tokenizer


class EngineHolder(Closeable):
    """Holds an engine until it is closed; then anything that needs it raises ClosedError."""

    def __init__(self, loaded: LoadedEngine):
        self._held: LoadedEngine | None = loaded
        self._ending = False  # no call may begin
        self._calls: set[_RunningCall] = set()  # those that have not returned
        self._lock = threading.RLock()  # entered itself, not by way of `_idle`: see `futures`
        self._idle = threading.Condition(self._lock)
        # A thread that still ran a step could crash the interpreter.
        close_at_exit(loaded.engine, lambda engine: engine.close())

    @property
    def _loaded(self) -> LoadedEngine:
        if self._held is None:
            raise self._end_error()
        return self._held

    def _end_error(self) -> Exception:
        """Return the error of calls after the end."""
        return closed_error(f"This {type(self).__name__}")

    @property
    def engine(self) -> Engine:
        """The engine, to queue requests one by one (`prepare`, `add`, `step`, `abort`).

        Raises ValueError for a model of images, which has no requests.
        """
        if isinstance(engine := self._loaded.engine, ImageEngine):
            raise ValueError(f"{type(self).__name__}.engine is not available for an image model: use `embed`.")
        return engine

    @property
    def model(self) -> LoadedModel:
        """Weights and config. Keeping it keeps the memory of the weights, also after `close`."""
        return self._loaded.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model directory, if it has one."""
        return self._loaded.tokenizer

    @property
    def memory(self) -> MemoryPlan | None:
        """How memory is divided; None for an encoder, which has no cache."""
        return self._loaded.memory

    def stats(self) -> EngineStats:
        """Return what the engine holds (requests, pages), and has done so far (tokens, steps); from any thread."""
        return self.engine.stats()

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budget of each memory in use, by name: who has how much."""
        return self._loaded.reservation.budgets

    @property
    def placement(self) -> Placement | None:
        """Where each layer is, and why; None if all are on the devices."""
        return self._loaded.placement

    @property
    def streaming(self) -> StreamingStatistics | None:
        """Measurements of bringing layers to the devices; None if all are on the devices."""
        return self._loaded.streaming

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Give back all memory, of devices and of the host; may be called again, and from any thread.

        Args:
          drain: let calls in other threads finish first; if not, or after `timeout`, they raise ClosedError once the
            running step has ended. A stream that is not being read is given up.
          timeout: seconds to wait at most for calls and the running step, which keeps the memory until it ends; what is
            on the devices already is waited for.
        """
        timeout = check_timeout(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        if self._held is None or self._held.engine.forked:
            return
        engine = self._held.engine
        with self._lock:
            self._ending = True
            if drain:
                self._idle.wait_for(lambda: all(call.is_mine for call in self._calls), timeout)
        engine.close(timeout=None if until is None else until - time.monotonic())
        del engine
        self._free()

    def _free(self) -> None:
        if self._held is not None and not self._held.engine.forked:
            reservation, self._held = self._held.reservation, None
            reservation.release()
            trim_heap()

    def _call(self) -> "_RunningCall":
        """A context manager for a call, which `close` in another thread may wait for."""
        return _RunningCall(self)


class _RunningCall:
    """A call of a holder's method, from its beginning to its end."""

    def __init__(self, holder: EngineHolder):
        self._holder, self._thread = holder, threading.get_ident()

    @property
    def is_mine(self) -> bool:
        """Whether this thread makes it, as when a signal handler closes what it interrupts."""
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        with self._holder._lock:
            if self._holder._ending:
                raise self._holder._end_error()
            self._holder._calls.add(self)

    def __exit__(self, *_: object) -> None:
        with self._holder._lock:
            self._holder._calls.discard(self)
            self._holder._idle.notify_all()
