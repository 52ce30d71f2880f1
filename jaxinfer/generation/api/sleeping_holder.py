"""How a model that serves gives its memory back for a while, and keeps its requests waiting."""

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from jaxinfer.fields import check
from jaxinfer.futures import INTERVAL
from jaxinfer.generation.api.holder import EngineHolder
from jaxinfer.generation.api.lender import EngineLender
from jaxinfer.generation.engine.decider import RequestDecider
from jaxinfer.serving.budget import Budget, by_budget
from jaxinfer.serving.errors import ServingError

_SleepLevel = Annotated[int, Meta(ge=0, le=2, description="0, 1 or 2")]


class SleepingHolder(EngineHolder):
    """Holds an engine that a decider steps, and that may sleep."""

    _decider: RequestDecider

    def _begin(self, decider: RequestDecider, *, asleep: bool) -> None:
        """Take the decider of the engine, which sleeps at first if it was loaded so."""
        self._decider = decider
        lender = self._loaded.lender
        self._sleep_lock = threading.RLock() if lender is None else lender.lock
        self._sleep_level = 2 if asleep else None
        if asleep:
            decider.pause()

    @property
    def is_sleeping(self) -> bool:
        """Whether it sleeps: requests wait for `wake_up`."""
        return self._sleep_level is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether it sleeps with requests that have begun."""
        return self._decider.is_halted

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` is implemented: its weights are not streamed."""
        return self._loaded.lender is not None

    def sleep(
        self,
        *,
        level: int = 1,
        wait: Callable[[], float] = lambda: math.inf,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Free memory of the KV cache and of weights, or let others take it; return whether it sleeps.

        Requests that have begun end first, or are interrupted after `wait`: they go on after `wake_up`, from the tokens
        that they have. Others wait for `wake_up`, until their deadlines, and then end with NotLoadedError. Cached
        prompts are forgotten with the KV cache.

        Args:
          level: 0 keeps everything until another model needs the memory, and takes what it needs; 1 frees the KV cache,
            and keeps the weights in the host's memory, where a CPU has them anyway; 2 frees that too, and reads them
            from disk to wake up. Others may take what is kept at any level.
          wait: called again and again while it waits for requests; returns the seconds to wait on at most.
          unless: likewise; once it returns true, the model stays awake.

        Raises ValueError for a model whose weights are streamed; ClosedError, DiedError.
        """
        level = check("level", level, _SleepLevel)
        with self._sleep_lock:
            if not self.can_sleep:
                raise ValueError("sleep is not implemented for a model whose weights are streamed: close it.")
            if not self.is_sleeping and not self._drained(wait, unless):
                self._decider.resume()
                return False
            if self._sleep_level is None or level > self._sleep_level:
                self._lender.sleep(level)
                self._sleep_level = level
        return True

    def _drained(self, wait: Callable[[], float], unless: Callable[[], bool]) -> bool:
        """Begin no more requests, and wait for those that have begun; return whether they have ended, or wait, too."""
        drained, halts = self._decider.pause(), False
        try:
            while not drained.wait(INTERVAL if halts else max(0.0, min(wait(), INTERVAL))):
                if not self._decider.loop.is_running:
                    raise self._end_error()
                if unless():
                    return False
                if not halts and wait() <= 0:
                    self._decider.halt()
                    halts = True
        except BaseException:  # Ctrl-C among them
            self._decider.resume()
            raise
        return True

    def wake_up(self) -> None:
        """Take the memory again that `sleep` freed, and serve the requests that wait; does nothing if it is awake.

        Raises BudgetError if there is too little memory, CheckpointError; ClosedError, DiedError.
        """
        with self._sleep_lock:
            if self.is_sleeping:
                self._lender.wake_up()
                self._sleep_level = None
                self._decider.resume()

    @property
    def waiting_since(self) -> float | None:
        """When the first request came that waits for `wake_up`, by `time.perf_counter`; None: none waits."""
        return self._decider.waiting_since

    def on_waiting(self, call: Callable[[], None]) -> None:
        """Have a function called when a request comes that waits for `wake_up`; it must not block."""
        self._decider.on_waiting = call

    def fail_waiting(self, error: ServingError) -> None:
        """End the requests that wait for `wake_up` with an error."""
        self._decider.fail_waiting(error)

    @property
    def reserved(self) -> Counter[Budget]:
        """The bytes that it has now, by budget."""
        return by_budget(self._loaded.reservation.sizes)

    @property
    def needed(self) -> Counter[Budget]:
        """The bytes that it has while it is awake, by budget."""
        return by_budget(self._lender.sizes)

    @property
    def lacking(self) -> Counter[Budget]:
        """The bytes that `wake_up` would lack, beyond what is free and what others would lend, by budget."""
        return self._loaded.reservation.lacking(self._lender.sizes)

    @property
    def has_all_memory(self) -> bool:
        """Whether nobody has taken anything since it sleeps."""
        return self._lender.has_all

    def lend(self, *, next_use: Callable[[], float], pinned: bool = False) -> None:
        """Set how its memory is lent while it sleeps.

        Args:
          next_use: returns the seconds until it is expected to wake up; infinity: nobody knows.
          pinned: whether it lends nothing.
        """
        if (lender := self._loaded.lender) is not None:
            lender.next_use, lender.pinned = next_use, pinned

    @property
    def _lender(self) -> EngineLender:
        lender = self._loaded.lender
        assert lender is not None, "it can sleep"
        return lender
