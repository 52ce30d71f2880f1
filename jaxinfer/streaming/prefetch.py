"""Layers on their way to the devices, some ahead of the one that computes (DeepSpeed Inference, section VI-B)."""

import collections
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax

from checkpoints.stores import Fetch, LayerStore
from jaxinfer.compiled import Costs
from jaxinfer.streaming.config import PrefetchDepth
from jaxinfer.streaming.statistics import StreamingStatistics

_log = logging.getLogger("jaxinfer.streaming")

STALL_SECONDS = 1e-3
"""A layer that takes longer to be there, once it is asked for, was waited for."""
LOG_SECONDS = 5.0
"""How often to say how streaming goes."""


class Prefetcher:
    """Gives a pass its layers one after the other, and brings those that come next, the next pass's too.

    A pass asks with `get` for each layer in turn, sends its computation to the devices, and names the result with
    `computing`. The next `get` waits for that result, gives the layer's memory back, and only then begins to fetch
    another one: so the devices never hold more than `depth.device + 1` layers of those that are not there all the
    time, however far the host runs ahead. The copy of a later layer is sent to the devices before the computation that
    is to hide it: a GPU's memory that is allocated later can be used only after that computation.

    Args:
      store: the layers.
      streamed: those that are not on the devices all the time, ascending.
      depth: how far ahead.
      costs: the record of what fetches take.

    Attributes:
      statistics: what was seen.
      live: layers that are on the devices, on the way there, or about to be given back; resident ones not counted.
    """

    def __init__(self, store: LayerStore, streamed: Sequence[int], depth: PrefetchDepth, costs: Costs):
        self._store, self._streamed, self._depth, self._costs = store, streamed, depth, costs
        self._places = {layer: place for place, layer in enumerate(streamed)}
        self._queue: collections.deque[tuple[int, Fetch]] = collections.deque()
        self._next = 0  # in `streamed`: which is asked for next
        self._in_use = False  # whether the computation in flight uses the first of the queue
        self._result: Any = None
        self._sent = 0.0
        self._logged = time.perf_counter()
        self.statistics = StreamingStatistics()

    @property
    def live(self) -> int:
        return len(self._queue)

    def get(self, layer: int) -> list[jax.Array]:
        """The leaves of a layer, on the devices. Raises CheckpointError, naming the layer, if they cannot be read."""
        self._finish()
        resident = layer not in self._places
        if not resident and (not self._queue or self._queue[0][0] != layer):
            self.restart()
            self._next = self._places[layer]
        begun = time.perf_counter()
        self._fill()
        if resident:
            self._sent = time.perf_counter()
            return self._store.start(layer).arrays()
        fetch, self._in_use = self._queue[0][1], True
        arrays = fetch.arrays()
        self._sent = time.perf_counter()  # a CPU may compute while a program is called
        if (waited := self._sent - begun) > STALL_SECONDS:
            self.statistics.stalled(waited)
        assert fetch.interval is not None
        self.statistics.fetched(fetch.tier, fetch.bytes, fetch.interval, fetch.cpu_seconds)
        self._costs.record(f"fetch_{fetch.tier}", (("bytes", fetch.bytes),), fetch.interval[1] - fetch.interval[0])
        return arrays

    def computing(self, result: Any) -> None:
        """The devices compute this (pytree of arrays) from the layer that `get` gave last."""
        self._result = result

    def restart(self) -> None:
        """Give back all that is on its way, after the computation in flight, which may have failed."""
        with contextlib.suppress(Exception):
            jax.block_until_ready(self._result)
        self._result, self._in_use = None, False
        while self._queue:
            self._queue.popleft()[1].release()

    def close(self) -> None:
        """Have the thread that waits for a layer, or will, get a CheckpointError at once; from any thread."""
        self._store.close()

    def _finish(self) -> None:
        """Wait for the computation in flight, and give the memory of its layer back."""
        if self._result is not None:
            jax.block_until_ready(self._result)
            self.statistics.computed((self._sent, now := time.perf_counter()))
            self._costs.record("layer", (), now - self._sent)
            self._result = None
            if now - self._logged > LOG_SECONDS:
                _log.info("%s", self.statistics)
                self._logged = now
        if self._in_use:
            self._in_use = False
            self._queue.popleft()[1].release()

    def _fill(self) -> None:
        while len(self._queue) < min(self._depth.host + 1, len(self._streamed)):
            layer = self._streamed[self._next]
            self._queue.append((layer, self._store.start(layer)))
            self._next = (self._next + 1) % len(self._streamed)
        for index in range(min(self._depth.device + 1, len(self._queue))):
            self._queue[index][1].place()
