"""What experts cost while a system runs: what was measured before, corrected by what loads and batches really take."""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping

from jaxinfer.experts.scheduling.profile import Profile, Profiles, Tier
from jaxinfer.experts.scheduling.request import Load

WINDOW = 15
"""How many of the last times count, by their median: a slow spell is so forgotten as soon as it is over."""
LEAST = 5
DRIFT = 1.05
"""By which factor times must differ from what is known before that is corrected: less is noise."""
FORGET = 60.0
"""Seconds after which what was seen counts no more: copies to the host's memory that were slow are made no more, and
nothing else would ever show that the slow spell is over."""

type _Key = tuple[str, str]


class ObservedProfiles(Mapping[_Key, Profile]):
    """Profiles that follow what is seen.

    Loads, evictions and batches each have a factor on what was measured, which leaves the ratios between batch sizes as
    they are.

    Args:
      measured: by architecture and processor.
      clock: in seconds.
    """

    def __init__(self, measured: Profiles, *, clock: Callable[[], float] = time.monotonic):
        self._measured, self._clock = measured, clock
        self._corrected: dict[_Key, Profile] = {}
        self._factors: dict[_Key, dict[str, float]] = defaultdict(dict)
        self._ratios: dict[_Key, dict[str, deque[float]]] = defaultdict(
            lambda: defaultdict(lambda: deque(maxlen=WINDOW))
        )
        self._seen: dict[_Key, dict[str, float]] = defaultdict(dict)

    def __getitem__(self, key: _Key) -> Profile:
        return self._corrected.get(key) or self._measured[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._measured)

    def __len__(self) -> int:
        return len(self._measured)

    def note_load(self, key: _Key, tier: Tier, seconds: float) -> None:
        """Take into account what a load took, alone."""
        self._note(key, tier, seconds, self._measured[key].load_seconds(tier))

    def note_eviction(self, key: _Key, seconds: float) -> None:
        """Take into account what a copy to the host's memory took."""
        self._note(key, "evict", seconds, self._measured[key].evict)

    def note_batch(self, key: _Key, size: int, seconds: float) -> None:
        """Take into account what a batch of this size took."""
        self._note(key, "batch", seconds, self._measured[key].seconds(size))

    def _note(self, key: _Key, what: str, seconds: float, expected: float) -> None:
        if not (seconds > 0 and expected > 0):  # as of a load that costs nothing
            return
        now, factors, ratios = self._clock(), self._factors[key], self._ratios[key][what]
        changed = self._forget(key, now)
        self._seen[key][what] = now
        ratios.append(seconds / expected)
        factor, known = statistics.median(ratios), factors.get(what, 1.0)
        if len(ratios) >= LEAST and not 1 / DRIFT <= factor / known <= DRIFT:
            factors[what] = factor
            changed = True
        if changed:
            self._corrected[key] = self._measured[key].scaled(factors)

    def _forget(self, key: _Key, now: float) -> bool:
        """Forget what has not been seen for long; returns whether that changes anything."""
        old = [what for what, seen in self._seen[key].items() if now - seen > FORGET]
        for what in old:
            del self._seen[key][what]
            del self._ratios[key][what]
            self._factors[key].pop(what, None)
        return bool(old)


class LoadTimes:
    """How long loads would take alone: while several are under way, each has its part of the time.

    Loads from one disk slow one another: the time from beginning to end would count the others' too.
    """

    def __init__(self) -> None:
        self._seconds: dict[Load, float] = {}
        self._counted = 0.0

    def begin(self, load: Load, now: float) -> None:
        """A load begins."""
        self._count(now)
        self._seconds[load] = 0.0

    def end(self, load: Load, now: float) -> float | None:
        """A load has ended: its seconds; None if it never began."""
        self._count(now)
        return self._seconds.pop(load, None)

    def _count(self, now: float) -> None:
        for load in self._seconds:
            self._seconds[load] += (now - self._counted) / len(self._seconds)
        self._counted = now
