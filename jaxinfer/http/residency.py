"""Which language models of a server have memory: those with requests, and of the others those worth most."""

import contextlib
import functools
import logging
import math
import operator
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.served_model import ServedModel
from jaxinfer.serving import NotLoadedError, ServingError

log = logging.getLogger(__name__)

DISK_BYTES_PER_SECOND = 1e9
"""Assumed for a model that was not loaded yet, to compare it with others."""

PREEMPT_AFTER = 10.0
"""Seconds that a request waits until running requests of another model are interrupted, unless a config says others."""
END_SECONDS = 10.0
"""Seconds to wait at most for a model that is being woken up when the server ends."""


class Residency:
    """Wakes models that have requests, in the order in which these came, and has others sleep for them.

    Models that sleep lend what they have. What is lacking is taken where the next use costs least: the seconds to have
    a byte again, times the model's requests a second. So a model may lose its KV cache and a part of its weights only.
    Models with requests make room only if those without do not suffice. Requests that come meanwhile wait for their
    next turn. Running ones may end, but not for ever: they are interrupted, and go on at their model's next turn, when
    another's request has waited for `preempt_after` seconds. A turn lasts at least as long as its model took to wake
    up, and twice as long as the last if requests were interrupted then, up to `LONGEST_TURN`. So a request is
    interrupted a few times at most, however many models wait.

    One thread does all this, one thing at a time. The server's routes give it work, too (`run`).

    Args:
      models: all models. Those that are not loaded yet are its own from `watch` on.
      preempt_after: the seconds; None: running requests always end first.

    Attributes:
      switches: how many times a model was woken up.
      switch_seconds: what this took in all, making room included.
    """

    def __init__(self, models: Iterable[ServedModel], *, preempt_after: float | None = PREEMPT_AFTER):
        self._models, self._preempt_after = list(models), preempt_after
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.switches, self.switch_seconds = 0, 0.0

    # From any thread

    def watch(self, model: ServedModel) -> None:
        """Wake a model whenever it has requests. Called once it is loaded, again without effect."""
        if (llm := model.loaded) is not None:
            llm.on_waiting(self._notify)
            llm.lend(next_use=model.use.expected, pinned=model.pinned)
        self._start()
        self._notify()

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the thread call a function that changes models, such as `sleep`."""
        future = Future[Any]()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._start()
        self._work.put(call)
        return future

    def close(self) -> None:
        """End the thread, once what it does now is done; models stay as they are."""
        self._closed = True
        self._notify()

    def join(self) -> None:
        """Wait for the end of the thread after `close`, so that no weights are on their way when the process ends."""
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _notify(self) -> None:
        self._work.put(None)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._loop, name="jaxinfer-residency", daemon=True)
                self._thread.start()

    # In its thread

    def _loop(self) -> None:
        while not self._closed:
            work = self._wait()
            if work is not None:
                work()
            try:
                while not self._closed and (model := self._next_waiting()) is not None:
                    self._bring(model)
                self._unload_idle()
            except ServingError as error:  # a model is closed or has died meanwhile
                log.warning("%s", error)
            except Exception:  # without this thread no model would be woken up again
                log.exception("Which models have memory could not be decided.")

    def _wait(self) -> Callable[[], None] | None:
        """Wait for work, or until a model has been idle for its `ttl`, or may be tried again."""
        ends = [model.use.last + model.ttl for model in self._models if model.ttl is not None and model.loaded]
        ends += [model.retry_at for model in self._models if model.retry_at is not None and model.loaded]
        try:
            return self._work.get(timeout=max(min(ends) - time.perf_counter(), 0.0) if ends else None)
        except queue.Empty:
            return None

    def _next_waiting(self) -> ServedModel | None:
        """The sleeping model whose request has waited longest."""
        waiting = [
            (since, index)
            for index, model in enumerate(self._models)
            if (llm := model.loaded) is not None
            and not model.held
            and model.retry_at is None
            and (since := llm.waiting_since) is not None
        ]
        return self._models[min(waiting)[1]] if waiting else None

    def _bring(self, model: ServedModel) -> None:
        """Wake a model for its requests, unless they are given up meanwhile. If that fails, they end with an error."""
        llm, begun = model.llm, time.perf_counter()
        try:
            self.wake_up(model, unless=lambda: self._closed or llm.waiting_since is None)
        except Exception as error:
            log.error("%s cannot be woken up.", model.name, exc_info=error)
            model.fail(error)
            llm.fail_waiting(model.not_loaded())
        self.switch_seconds += time.perf_counter() - begun

    def wake_up(self, model: ServedModel, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Wake a model, and have others sleep for it. Call it by `run`.

        Models without requests all sleep, which costs nothing: then the ledger takes what is lacking where that costs
        least. Those that have lost nothing wake up again.

        unless: once it returns true, while other models end their requests, nothing more is done.

        Raises NotLoadedError if there is no room beside pinned models; as `AsyncLLM.wake_up` does.
        """
        llm, begun = model.llm, time.perf_counter()
        if not llm.is_sleeping:
            return
        paused = list[ServedModel]()
        try:
            for victim in self._victims(model):
                since = llm.waiting_since
                wait = functools.partial(self._patience, victim, begun if since is None else since)
                if not self._make_room(victim, wait, unless):
                    return
                paused.append(victim)
            begun = time.perf_counter()
            llm.wake_up()
            model.woken(begun)
            self.switches += 1
        finally:
            for victim in paused:
                if (other := victim.loaded) is not None and other.has_all_memory:
                    with contextlib.suppress(ServingError):  # it was closed or has died meanwhile
                        other.wake_up()

    def _patience(self, victim: ServedModel, since: float) -> float:
        """The seconds that running requests still have, while another has waited since then."""
        if self._preempt_after is None:
            return math.inf
        return max(since + self._preempt_after, victim.woken_at + victim.turn_seconds) - time.perf_counter()

    def _victims(self, model: ServedModel) -> Iterator[ServedModel]:
        """Yield the models that sleep for another, in order: those without requests, and others while room is lacking.

        Raises NotLoadedError if all together are too small.
        """
        llm, now, candidates = model.llm, time.perf_counter(), self._candidates(model)
        more = llm.needed - llm.reserved
        if all(budget.free is None or size <= budget.free for budget, size in more.items()):
            return
        missing = functools.reduce(operator.sub, (_loaded(other).reserved for other in candidates), llm.lacking)
        if missing:
            (budget, size), *_ = missing.items()
            raise NotLoadedError(
                f"the model {model.name!r} needs {size:,} bytes of {budget.name} more than are free or can be freed."
                f"{budget.report}"
            )
        for other in sorted(candidates, key=lambda each: _worth(each, now)):
            if _loaded(other).num_requests and not llm.lacking:
                break
            yield other

    def _candidates(self, model: ServedModel) -> list[ServedModel]:
        return [
            other
            for other in self._models
            if other is not model
            and not other.pinned
            and (llm := other.loaded) is not None
            and llm.can_sleep
            and not llm.is_sleeping
        ]

    def _make_room(self, victim: ServedModel, wait: Callable[[], float], unless: Callable[[], bool]) -> bool:
        """Have a model sleep, which lends what it has; return whether it does. wait, unless: as of `AsyncLLM.sleep`."""
        llm = _loaded(victim)
        llm.on_waiting(self._notify)
        slept = llm.sleep(level=0, wait=wait, unless=unless)
        victim.interruptions = victim.interruptions + 1 if llm.is_interrupted else 0
        return slept

    def _unload_idle(self) -> None:
        """Unload the models that nobody has asked for their `ttl`."""
        now = time.perf_counter()
        for model in self._models:
            llm = model.loaded
            if llm is None or model.ttl is None or now < model.use.last + model.ttl:
                continue
            if llm.num_requests:
                model.use.last = now
            else:
                model.unload()


def _loaded(model: ServedModel) -> AsyncLLM:
    assert model.loaded is not None
    return model.loaded


def _worth(model: ServedModel, now: float) -> tuple[bool, float, float]:
    """The order in which models make room: those without requests first, and of these those whose next use costs least.

    The least recently used goes first of models that nobody has asked for lately.
    """
    llm = _loaded(model)
    size = llm.needed.total()
    seconds = model.load_seconds or size / DISK_BYTES_PER_SECOND
    return llm.num_requests > 0, seconds * model.use.per_second(now) / size, model.use.last
