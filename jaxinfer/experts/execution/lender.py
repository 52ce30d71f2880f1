"""Lends the memory of a system's experts to other owners in the process, and takes it back when they are needed."""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxinfer.experts.execution.loader import ExpertLoader
from jaxinfer.experts.execution.place import Place
from jaxinfer.experts.scheduling.pool import ModelPool
from jaxinfer.experts.scheduling.scheduler import Scheduler
from jaxinfer.serving.budget import (
    Budget,
    BudgetError,
    Lender,
    Lenders,
    Offer,
    Reservation,
    Sizes,
    budget_of,
    host_budget,
)
from jaxinfer.serving.loop import Loop
from jaxinfer.serving.use import Use

EXPERTS = "experts"
"""The tenant of pools."""
HOST_CACHE = "host cache"
"""The tenant of experts that left a device."""
RETRY_SECONDS = 10.0
"""Seconds after which memory is asked for again that nobody would give back."""


class ExpertLender:
    """Lends memory of pools and of the host cache: what is free in them, and experts that no request waits for.

    A pool keeps room for its pinned experts and for any other expert. What was lent is asked for again once experts are
    loaded: then the system has work, and less memory for it than it was given.

    Args:
      scheduler: knows which experts are in use.
      loader: has their weights.
      loop: its lock guards the scheduler.
      reservation: the system's memory.
      places: the devices of each pool.

    Attributes:
      use: how often the system is asked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        loader: ExpertLoader,
        loop: Loop[Any],
        reservation: Reservation,
        places: Sequence[Place],
    ):
        self.use = Use()
        self._scheduler, self._manager = scheduler, scheduler.manager
        self._loader, self._loop, self._places = loader, loop, places
        self._reservation = weakref.proxy(reservation)  # so that a system that is dropped gives its memory back
        self._given: Sizes = dict(reservation.sizes)
        self._lent = Counter[tuple[Budget, str]]()
        self._moving = threading.Lock()  # held while memory is given or taken back
        self._loads, self._asks, self._retry_at = 0, False, 0.0
        self._resize()

    def wants_back(self) -> bool:
        """Check whether `take_back` is due, which must then be called; with the loop's lock."""
        works = bool(self._lent) and self._switches > self._loads
        due = works and not self._asks and self._loop.clock() >= self._retry_at
        self._asks |= due
        return due

    def take_back(self) -> None:
        """Ask others for what was lent; without the loop's lock. If they do not give it, it is tried again later."""
        if self._moving.acquire(blocking=False):  # who takes more meanwhile may wait for this thread's next work
            try:
                self._ask()
            finally:
                self._moving.release()
        self._asks = False

    def _ask(self) -> None:
        lent, self._lent = self._lent, Counter()
        try:
            self._resize(unused=True)
        except BudgetError:
            self._lent, self._retry_at = lent, self._loop.clock() + RETRY_SECONDS
            return
        with self._loop.lock:
            self._manager.take_back()
            self._scheduler.wake()
        self._loop.wake()

    @property
    def _switches(self) -> int:
        return self._manager.statistics.switches

    def _resize(self, *, unused: bool = False) -> None:
        sizes = {place: size - self._lent[place] for place, size in self._given.items()}
        self._reservation.resize(sizes, lenders=self._lenders(), unused=unused)

    def _lenders(self) -> Lenders:
        budgets = {budget_of(device) for place in self._places for device in place.devices}
        lenders = {
            (budget, EXPERTS): Lender(
                functools.partial(self._offer, budget),
                functools.partial(self._give, functools.partial(self._lend, budget)),
            )
            for budget in budgets
        }
        give = functools.partial(self._give, self._lend_of_host)
        lenders[host_budget(), HOST_CACHE] = Lender(self._offer_of_host, give)
        return lenders

    def _pools(self, budget: Budget) -> Iterator[tuple[ModelPool, Place, int]]:
        """The pools in a memory, with their places, and how many of its devices they have."""
        for pool, place in zip(self._manager.pools, self._places, strict=True):
            if count := sum(budget_of(device) is budget for device in place.devices):
                yield pool, place, count

    def _offer(self, budget: Budget) -> Offer:
        with self._loop.lock:
            offers = [(self._manager.offer(pool), count) for pool, _, count in self._pools(budget)]
        size, seconds = sum(offer.bytes * count for offer, count in offers), sum(offer.seconds for offer, _ in offers)
        return Offer(size, seconds, self.use.expected())

    def _offer_of_host(self) -> Offer:
        with self._loop.lock:
            offer = self._manager.offer_of_host()
        return Offer(offer.bytes * self._copies, offer.seconds, self.use.expected())

    def _give(self, lend: Callable[[int], Sequence[Callable[[], None]]], size: int) -> None:
        """Give memory, unless more is given or taken back just now.

        lend: decides, with the loop's lock, what leaves; returns the functions that have it leave.
        """
        if not self._moving.acquire(blocking=False):
            return
        try:
            with self._loop.lock:
                leave, self._loads = lend(size), self._switches
            for run in leave:
                run()
            self._resize()
        finally:
            self._moving.release()

    def _lend(self, budget: Budget, size: int) -> Sequence[Callable[[], None]]:
        leave = list[Callable[[], None]]()
        for pool, place, count in self._pools(budget):
            each = min(self._manager.offer(pool).bytes, -(-size // count))
            if each <= 0 or (evict := self._manager.lend(pool, each)) is None:
                continue
            leave.append(self._loader.begin_eviction(evict.pool, evict.evictions, evict.dropped))
            for device in place.devices:
                self._lent[budget_of(device), EXPERTS] += each
            size -= each * count
        return leave

    def _lend_of_host(self, size: int) -> Sequence[Callable[[], None]]:
        each = min(self._manager.offer_of_host().bytes, -(-size // self._copies))
        self._lent[host_budget(), HOST_CACHE] += each * self._copies
        return [self._loader.begin_eviction(0, (), self._manager.lend_of_host(each))]

    @property
    def _copies(self) -> int:
        """The parts of a copy in the host cache: one for each device of a mesh."""
        return len(self._places[0].devices)
