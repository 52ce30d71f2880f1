"""Experts on the devices: those that a step needs are fetched, and stay until others need their place."""

import collections
import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxinfer.checkpoints.stores import Fetch, LayerStore
from jaxinfer.compiled import Costs
from jaxinfer.streaming.prefetch import STALL_SECONDS
from jaxinfer.streaming.residents import Residents
from jaxinfer.streaming.statistics import StreamingStatistics

GROUP = 4
"""Experts that one program runs at most: a call costs as much as reading a small one from memory."""
IN_FLIGHT = 16
"""Experts that are on their way at a time: they keep a disk busy, and what they are read into is small."""

type ExpertKey = tuple[int, int]
"""The layer of an expert, and its number there."""


class ExpertCache:
    """The experts of all layers, of which as many as fit are on the devices: those that were used last.

    A pass asks for those of a layer with `groups`, sends the computation of each group to the devices, and names its
    result with `computing`. An expert leaves only when the computations that use it are done.

    Args:
      store: the experts.
      places: the number of each in the store.
      slots: how many there is room for on the devices.
      statistics: counts what is fetched.
      costs: the record of fetch times.
    """

    def __init__(
        self,
        store: LayerStore,
        places: Mapping[ExpertKey, int],
        slots: int,
        *,
        statistics: StreamingStatistics,
        costs: Costs,
    ):
        self._store, self._places, self._statistics, self._costs = store, places, statistics, costs
        self._residents: Residents[ExpertKey, Fetch] = Residents(slots)
        self._used = collections.deque[ExpertKey]()  # pinned, since computations use them
        self._result: Any = None  # of the last computation

    def groups(self, layer: int, experts: Sequence[int]) -> Iterator[list[tuple[int, list[jax.Array]]]]:
        """Yield a layer's experts with their leaves, up to `GROUP` at a time: first those that are there.

        The others are asked for before that, as many as there is room for, and come in this order.
        Raises CheckpointError, naming layer and expert, if one cannot be read.
        """
        self._finish()
        there = [(layer, expert) for expert in experts if (layer, expert) in self._residents]
        absent = collections.deque((layer, expert) for expert in experts if (layer, expert) not in self._residents)
        for key in there:
            self._residents.pin(key)
        coming = collections.deque[ExpertKey]()
        self._fetch(absent, coming)
        self._statistics.expert_hits += len(there)
        for group in itertools.batched(there, GROUP):
            yield self._give(group)
        while coming or absent:
            if absent and not self._residents.has_room(1):
                self._finish()
            self._fetch(absent, coming)
            group = [coming.popleft()]
            while len(group) < GROUP and coming and self._residents.pinned(coming[0]).ready:
                group.append(coming.popleft())
            for key in group:
                self._arrive(self._residents.pinned(key))
            yield self._give(group)

    def computing(self, result: Any) -> None:
        """Note that the devices compute `result`, a pytree of arrays, from all groups so far."""
        self._result = result

    def restart(self) -> None:
        """Free everything, after the computations in flight, which may have failed. Interrupted, it can be repeated.

        Each expert is freed at most once: a buffer that two others are read into would be worse than one that is lost.
        """
        with contextlib.suppress(Exception):
            jax.block_until_ready(self._result)
        self._result = None
        self._used.clear()
        fetches = self._residents.values()
        self._residents.clear()
        for fetch in fetches:
            with contextlib.suppress(Exception):
                fetch.release()

    def __contains__(self, key: object) -> bool:
        """Check whether an expert is there, or on its way."""
        return key in self._residents

    def close(self) -> None:
        """Have the thread that waits for an expert, or will, get a CheckpointError at once; from any thread."""
        self._store.close()

    def _fetch(self, absent: collections.deque[ExpertKey], coming: collections.deque[ExpertKey]) -> None:
        """Ask for experts, in the place of those that were not used for the longest time."""
        while absent and len(coming) < IN_FLIGHT and self._residents.has_room(1):
            for evicted in self._residents.evict(1).values():
                evicted.release()
            key = absent.popleft()
            fetch = self._store.start(self._places[key])
            self._residents.add(key, fetch)
            self._residents.pin(key)
            if fetch.tier == "host":  # the copy runs by itself
                fetch.place()
            coming.append(key)

    def _arrive(self, fetch: Fetch) -> None:
        """Wait for an expert."""
        begun = time.perf_counter()
        fetch.settle()
        if (waited := time.perf_counter() - begun) > STALL_SECONDS:
            self._statistics.stalled(waited)
        if fetch.interval is None:  # it is on the devices all the time
            self._statistics.expert_hits += 1
            return
        self._statistics.fetched(fetch.tier, fetch.bytes, fetch.interval, fetch.cpu_seconds)
        self._statistics.expert_fetches += 1
        self._statistics.expert_bytes += fetch.bytes
        seconds = fetch.interval[1] - fetch.interval[0]
        self._costs.record(f"fetch_expert_{fetch.tier}", (("bytes", fetch.bytes),), seconds)

    def _give(self, group: Sequence[ExpertKey]) -> list[tuple[int, list[jax.Array]]]:
        self._used += group
        return [(expert, self._residents.pinned((layer, expert)).arrays()) for layer, expert in group]

    def _finish(self) -> None:
        """Wait for the computations; the experts that they used may leave."""
        jax.block_until_ready(self._result)
        self._result = None
        while self._used:
            self._residents.unpin(self._used[0])
            self._used.popleft()
