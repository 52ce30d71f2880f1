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
from jaxinfer.generation.engine.decider import RequestDecider
from jaxinfer.generation.execution.spares import free_spares
from jaxinfer.serving.budget import Budget, by_budget
from jaxinfer.serving.errors import ServingError

_SleepLevel = Annotated[int, Meta(ge=1, le=2, description="1 or 2")]


class SleepingHolder(EngineHolder):
    """Holds an engine that a decider steps, and that may sleep."""

    _decider: RequestDecider

    def _begin(self, decider: RequestDecider, *, asleep: bool) -> None:
        """Take the decider of the engine, which sleeps at first if it was loaded so."""
        self._decider = decider
        self._sleep_lock = threading.RLock()  # entered itself: see `futures`
        self._sleep_level = 2 if asleep else 0
        if asleep:
            decider.pause()

    @property
    def is_sleeping(self) -> bool:
        """Whether it sleeps: requests wait for `wake_up`."""
        return self._sleep_level > 0

    @property
    def is_interrupted(self) -> bool:
        """Whether it sleeps with requests that have begun."""
        return self._decider.is_halted

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` is implemented: its weights are not streamed."""
        return self._loaded.weights is not None

    def sleep(
        self,
        *,
        level: int = 1,
        wait: Callable[[], float] = lambda: math.inf,
        unless: Callable[[], bool] = lambda: False,
        hand_over: bool = False,
    ) -> bool:
        """Free the memory of the KV cache and, on other devices than CPUs, of the weights; return whether it did.

        Requests that have begun end first, or are interrupted after `wait`: they go on after `wake_up`, from the tokens
        that they have. Others wait for `wake_up`, until their deadlines, and then end with NotLoadedError. Cached
        prompts are forgotten.

        Args:
          level: 1 keeps the weights in the host's memory, where a CPU has them anyway; 2 frees that too, and reads them
            from disk to wake up.
          wait: called again and again while it waits for requests; returns the seconds to wait on at most.
          unless: likewise; once it returns true, the model stays awake.
          hand_over: whether the memory is left for the next model that wakes up, which is faster than new memory.

        Raises ValueError for a model whose weights are streamed; ClosedError, DiedError.
        """
        level = check("level", level, _SleepLevel)
        with self._sleep_lock:
            if not self.can_sleep:
                raise ValueError("sleep is not implemented for a model whose weights are streamed: close it.")
            if not self.is_sleeping and not self._drained(wait, unless):
                self._decider.resume()
                return False
            if level > self._sleep_level:
                self._loaded.sleep(level)
                self._sleep_level = level
        if not hand_over:
            free_spares()
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
            try:
                if self.is_sleeping:
                    self._loaded.wake_up()
                    self._sleep_level = 0
                    self._decider.resume()
            finally:
                free_spares()

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
        return by_budget(self._loaded.sizes)
