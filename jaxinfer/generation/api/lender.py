"""How an engine gives its memory back while it sleeps, lends it to others, and has it again."""

import contextlib
import functools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.execution.memory import MemoryPlan, device_tenants
from jaxinfer.generation.execution.spares import free_spares, keeping_spares
from jaxinfer.generation.execution.whole_weights import WholeWeights
from jaxinfer.models.devices import devices_of
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.serving.budget import (
    Budget,
    BudgetError,
    Lender,
    Lenders,
    Offer,
    Reservation,
    Sizes,
    budget_of,
    by_budget,
    host_budget,
    sizes_of,
)
from jaxinfer.serving.errors import ClosedError


class EngineLender:
    """Frees the memory of an engine that sleeps, lends it, and takes it back.

    While it sleeps, others who ask the ledger take what they need of it: the KV cache with all that belongs to it, and
    weights, part by part. The cache costs what its tokens are worth (`Engine.cache_seconds`). Nothing is lent while the
    engine is awake.

    Args:
      engine: the engine.
      model: its model, whose leaves are shapes while it sleeps.
      weights: how its weights leave the devices and come back.
      reservation: its memory.
      sizes: what it reserves while it is awake.
      memory: how memory is divided; None for an encoder.
      asleep: whether it has nothing yet.

    Attributes:
      lock: held while it falls asleep or wakes up. Who takes its memory meanwhile does not wait, and gets none.
      weights: the same.
      sizes: the same.
      next_use: returns the seconds until it is expected to wake up; infinity: nobody knows.
      pinned: whether it lends nothing.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        model: LoadedModel,
        weights: WholeWeights,
        reservation: Reservation,
        sizes: Sizes,
        memory: MemoryPlan | None,
        asleep: bool,
    ):
        self.weights, self.sizes = weights, sizes
        self._engine, self._model = engine, model
        self._reservation = weakref.proxy(reservation)  # which has the lenders, and so this
        self._state, self._host_pages = dict[str, int](), dict[str, int]()  # bytes of each device, of the host
        if memory is not None:
            self._state = {tenant: size for tenant, size in memory.tenants.items() if tenant != "weights"}
            self._host_pages = memory.host_tenants
        self._asleep, self._has_state, self._has_host_pages = asleep, not asleep, not asleep
        self.lock = threading.RLock()  # entered itself: see `futures`
        self.next_use: Callable[[], float] = lambda: math.inf
        self.pinned = False

    @property
    def has_all(self) -> bool:
        """Whether nothing of its memory was given back."""
        return by_budget(self._reservation.sizes) == by_budget(self.sizes)

    def sleep(self, level: int) -> None:
        """Free memory, once no request runs; with the lock.

        level: 0 keeps all until others take it, 1 keeps the weights in the host's memory, 2 keeps nothing.
        """
        self._engine.sleep()
        self._set_leaves(self._model.placed_shapes())
        self._asleep = True
        if level > 0:
            self._free_state()
            self.weights.release(to_disk=level > 1)
        if level > 1:
            self._free_host_pages()
        self._shrink()

    def wake_up(self) -> None:
        """Bring the weights back, and make an empty KV cache if it was freed; with the lock.

        Raises BudgetError, CheckpointError, ClosedError.
        """
        with keeping_spares():
            self._reservation.resize(self.sizes, unused=True)
            try:
                leaves = self.weights.load()
                self._engine.wake_up(leaves)
            except BaseException:
                self._give_up()
                raise
            self._set_leaves(leaves)
            self._asleep, self._has_state, self._has_host_pages = False, True, True

    def _give_up(self) -> None:
        """Sleep again, with nothing."""
        self.weights.release(to_disk=True)
        with contextlib.suppress(ClosedError):  # which frees the rest
            self._engine.sleep()
            self._free_state()
            self._free_host_pages()
            self._reservation.resize({})

    def _free_state(self) -> None:
        self._engine.free_state()
        self._has_state = False

    def _free_host_pages(self) -> None:
        if self._engine.page_tier is not None:
            self._engine.page_tier.free_memory()
        self._has_host_pages = False

    # What it still has, and lends

    def _shrink(self) -> None:
        """Reserve what is left, all of which others may take."""
        free_spares()
        try:
            self._reservation.resize(self._left(), lenders=self._lenders())
        except BudgetError:  # others have taken the room for copies of the weights
            self.weights.release_host()
            self._reservation.resize(self._left(), lenders=self._lenders())

    def _left(self) -> Sizes:
        """The bytes that it still has."""
        devices, weights = devices_of(self._model.mesh), self.weights
        if self._has_state and self._has_host_pages and weights.device_bytes == self._model.bytes_per_device():
            return self.sizes
        tenants = device_tenants(weights=weights.device_bytes) | (self._state if self._has_state else {})
        host = {"weights": weights.host_bytes * len(devices)} | (self._host_pages if self._has_host_pages else {})
        return sizes_of(devices, tenants, host=host)

    def _lenders(self) -> Lenders:
        devices, lenders = devices_of(self._model.mesh), dict[tuple[Budget, str], Lender]()
        state, kept = sizes_of(devices, self._state), sizes_of([], {}, host=self._host_pages)

        def lend(places: Iterable[tuple[Budget, str]], free: Callable[[int], None], cost: Callable[[], float]) -> None:
            for place in places:
                offer = functools.partial(self._offer, place, cost)
                lenders[place] = Lender(offer, functools.partial(self._give, free))

        def reading() -> float:
            return 1 / self.weights.bytes_per_second

        lend([(host_budget(), "weights")], lambda size: self.weights.release_host(), reading)
        for budget, count in Counter(map(budget_of, devices)).items():
            lend([(budget, "weights")], functools.partial(self._free_weights, count), reading)
        lend(state, lambda size: self._free_state(), lambda: self._engine.cache_seconds() / state.total())
        lend(
            kept,
            lambda size: self._free_host_pages(),
            lambda: self._engine.cache_seconds(on_host=True) / kept.total(),
        )
        return lenders

    def _offer(self, place: tuple[Budget, str], cost: Callable[[], float]) -> Offer:
        """The part of a memory that it still has. cost: the seconds to have a byte of it again."""
        size = self._reservation.sizes.get(place, 0)
        if self.pinned or not size:
            return Offer(0, 0.0)
        with contextlib.suppress(ClosedError):
            return Offer(size, size * cost(), self.next_use())
        return Offer(0, 0.0)

    def _give(self, free: Callable[[int], None], size: int) -> None:
        """Free memory for others, unless it falls asleep or wakes up just now, or is closed."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self._asleep:
                with contextlib.suppress(ClosedError):
                    free(size)
                    self._shrink()
        finally:
            self.lock.release()

    def _free_weights(self, count: int, size: int) -> None:
        """Free so many bytes of weights, of which as many devices as `count` have parts; copies stay where they fit."""
        room, everywhere = host_budget().free, self.weights.device_bytes * len(devices_of(self._model.mesh))
        to_disk = self._model.platform == "cpu" or (room is not None and room < everywhere)
        self.weights.release(-(-size // count), to_disk=to_disk)

    def _set_leaves(self, leaves: Iterable[Any]) -> None:
        self._model.leaves.update(zip(self._model.leaves, leaves, strict=True))
        vars(self._model).pop("state", None)  # a cached property
