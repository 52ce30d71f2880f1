"""A host's pages of the prefix cache in a simulation: which there are, and how long they take, without content."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxinfer.compiled import Costs, CostTable
from jaxinfer.evaluation.generation.device import VirtualClock
from jaxinfer.futures import InterruptibleFuture
from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.host_pages import READ_PAGE, HostPages
from jaxinfer.generation.engine.page_tier import Load, Loaded
from jaxinfer.generation.engine.restoring import WRITE_PAGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierTimes:
    """Seconds of a page that comes back from the host.

    Attributes:
      read: to put it into a block, which requests wait for.
      write: by which it lengthens the step that brings it to the devices.
    """

    read: float
    write: float

    @classmethod
    def from_costs(cls, costs: CostTable) -> "TierTimes":
        """Take the means of a record. Raises ValueError if it has none."""
        read, write = costs.mean(READ_PAGE), costs.mean(WRITE_PAGE)
        if read is None or write is None:
            raise ValueError("The record of costs has no page that came back from the host: run the model first.")
        return cls(read=read, write=write)


class VirtualPages(HostPages):
    """The pages that a host keeps, read one after the other in virtual time.

    Args:
      count: how many pages.
      buckets: the sizes that pages are moved in.
      clock: the engine's.
      times: seconds of a page.
    """

    def __init__(self, count: int, buckets: Buckets, clock: VirtualClock, times: TierTimes):
        super().__init__(count, _block(1), buckets, Costs(learns=False))
        self._moves, self._clock, self._times, self._free = buckets.moves_of, clock, times, 0.0

    def put(self, keys: Sequence[bytes], blocks: Sequence[PageBlock]) -> None:
        for key in keys:
            if key not in self:
                self._take(key)

    def get(self, keys: Sequence[bytes]) -> Load:
        self._use(keys)
        self._free = max(self._clock.now, self._free) + self._times.read * len(keys)
        loaded = Loaded(_block(sum(self._moves(len(keys)))), len(keys))
        reading = _Reading(self._clock, self._free, loaded)
        return Load(tuple(keys), reading, self._clock.now, clock=self._clock)


class _Reading(InterruptibleFuture[Loaded]):
    """Pages that are there at some time."""

    def __init__(self, clock: VirtualClock, ends: float, loaded: Loaded):
        super().__init__(lambda: loaded)
        self._clock, self._ends, self._loaded = clock, ends, loaded

    def done(self) -> bool:
        return self._clock.now >= self._ends

    def wait(self, seconds: float = np.inf) -> bool:
        self._clock.wait(min(self._ends - self._clock.now, seconds))
        return self.done()

    def result(self, seconds: float = np.inf) -> Loaded:
        self.wait()
        return self._loaded


def _block(pages: int) -> PageBlock:
    """A block of so many pages without content, [S, N]."""
    return PageBlock((np.empty((1, pages), np.uint8),))
