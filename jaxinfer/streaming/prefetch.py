"""Layers on their way to the devices, some ahead of the one that computes (DeepSpeed Inference, section VI-B)."""

import collections
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxinfer.checkpoints.stores import Fetch, LayerStore
from jaxinfer.compiled import Costs
from jaxinfer.streaming.config import PrefetchDepth
from jaxinfer.streaming.statistics import StreamingStatistics

_log = logging.getLogger("jaxinfer.streaming")

STALL_SECONDS = 1e-3
"""Seconds from which a wait for a layer counts as a stall."""
LOG_SECONDS = 5.0
"""Seconds between log messages about streaming."""


class _Computation(NamedTuple):
    """A computation sent to the devices and not known to be done.

    Attributes:
      result: a pytree of arrays.
      sent: when it was sent, by `time.perf_counter`.
      layers: number of layers it runs.
      streamed: whether it uses a layer of the queue: the first that no earlier computation uses.
    """

    result: Any
    sent: float
    layers: int
    streamed: bool


class Prefetcher:
    """Queue of streamed layers: gives a pass one after the other, and fetches the next, including the next pass's.

    A pass asks with `get` for each of them in turn, sends its computation to the devices, and names the result with
    `computing`, as it does for layers that are there all the time. Memory is freed once the computation that used it is
    seen to be done, and only then the next layer is fetched: so the devices never hold more than `depth.device + 1`
    layers, however far the host runs ahead. `get` waits for computations until at least one layer can be fetched ahead
    of the one asked for: with a depth of 1 for all before it, with more for all but the last `depth.device - 1`, which
    may still run when the next one is sent. The copy of a later layer is sent to the devices before the computation
    that is to hide it: a GPU's memory that is allocated later can be used only after that computation.

    Args:
      store: the layers.
      streamed: the layers that are not on the devices all the time, ascending.
      depth: how far ahead layers are fetched.
      costs: the record of fetch times.

    Attributes:
      statistics: the counters.
      live: number of layers on the devices, on the way there, or about to be freed, without resident ones.
    """

    def __init__(self, store: LayerStore, streamed: Sequence[int], depth: PrefetchDepth, costs: Costs):
        self._store, self._streamed, self._depth, self._costs = store, streamed, depth, costs
        self._places = {layer: place for place, layer in enumerate(streamed)}
        self._queue: collections.deque[tuple[int, Fetch]] = collections.deque()  # layers in use, then those ahead
        self._computations: collections.deque[_Computation] = collections.deque()
        self._next = 0  # index in `streamed` of the layer asked for next
        self._given = False  # whether `get` has given a layer whose computation is not named yet
        self._sent = 0.0
        self._done = 0.0  # when the last computation was seen to be done
        self._logged = time.perf_counter()
        self.statistics = StreamingStatistics()

    @property
    def live(self) -> int:
        return len(self._queue)

    @property
    def _used(self) -> int:
        """The number of layers of the queue that computations use."""
        return sum(computation.streamed for computation in self._computations)

    def get(self, layer: int) -> list[jax.Array]:
        """Return a streamed layer's leaves on the devices.

        Raises CheckpointError, naming the layer, if they cannot be read.
        """
        while self._used > max(0, self._depth.device - 1):
            self._wait()
        if self._given or self._ahead() not in (None, layer):  # the pass before was aborted
            self.restart()
        if self._ahead() is None:
            self._next = self._places[layer]
        begun = time.perf_counter()
        self._fill()
        fetch = self._queue[self._used][1]
        if not fetch.ready:
            self.finish()  # there is nothing to send meanwhile
        arrays, self._given = fetch.arrays(), True
        self._sent = time.perf_counter()  # a CPU may compute while a program is called
        if (waited := self._sent - begun) > STALL_SECONDS:
            self.statistics.stalled(waited)
        assert fetch.interval is not None
        self.statistics.fetched(fetch.tier, fetch.bytes, fetch.interval, fetch.cpu_seconds)
        self._costs.record(f"fetch_{fetch.tier}", (("bytes", fetch.bytes),), fetch.interval[1] - fetch.interval[0])
        return arrays

    def _ahead(self) -> int | None:
        """The first layer of the queue that no computation uses."""
        return self._queue[self._used][0] if len(self._queue) > self._used else None

    def computing(self, result: Any, layers: int = 1) -> None:
        """Note that the devices compute `result`, a pytree of arrays.

        It uses the layer of the last `get`, or resident ones.
        """
        sent, streamed = self._sent if self._given else time.perf_counter(), self._given
        if not streamed and self._computations and not self._computations[-1].streamed:
            before = self._computations.pop()  # it frees no memory: one wait for both is enough
            sent, layers = before.sent, before.layers + layers
        self._computations.append(_Computation(result, sent, layers, streamed))
        self._given = False

    def finish(self) -> None:
        """Wait for all computations, fetching layers as each frees its memory."""
        while self._computations:
            self._wait()
            self._fill()

    def restart(self) -> None:
        """Free everything under way, after the computations in flight, which may have failed.

        Interrupted anywhere, it can be called again. Each layer is freed at most once: a buffer that two later layers
        are read into would be worse than one that is lost to the garbage collector.
        """
        while self._computations:
            with contextlib.suppress(Exception):
                jax.block_until_ready(self._computations[0].result)
            self._computations.popleft()
        self._given = False
        while self._queue:
            with contextlib.suppress(Exception):
                self._queue.popleft()[1].release()

    def close(self) -> None:
        """Have the thread that waits for a layer, or will, get a CheckpointError at once; from any thread."""
        self._store.close()

    def _wait(self) -> None:
        """Wait for the first computation, and free the memory of its layer."""
        first = self._computations[0]
        jax.block_until_ready(first.result)
        begun, self._done = max(first.sent, self._done), time.perf_counter()
        self.statistics.computed((begun, self._done), first.layers)
        if self._done - self._logged > LOG_SECONDS:
            _log.info("%s", self.statistics)
            self._logged = self._done
        self._computations.popleft()
        if first.streamed:
            self._costs.record("layer", (), self._done - begun)
            self._queue.popleft()[1].release()

    def _fill(self) -> None:
        while len(self._queue) < min(self._depth.host + 1, len(self._streamed)):
            layer = self._streamed[self._next]
            self._queue.append((layer, self._store.start(layer)))
            self._next = (self._next + 1) % len(self._streamed)
        for index in range(min(self._depth.device + 1, len(self._queue))):
            self._queue[index][1].place()
