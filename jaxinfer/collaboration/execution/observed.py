"""What experts cost while a system runs: what was measured before, corrected by what loads and batches really take."""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

from jaxinfer.collaboration.scheduling.profile import Profile, Profiles, Tier
from jaxinfer.collaboration.scheduling.request import Load

WINDOW = 15
"""How many of the last times count, by their median: a slow spell is so forgotten as soon as it is over."""
LEAST = 5
DRIFT = 1.1
"""By which factor times must differ from what is known before that is corrected: less is noise."""

type _Key = tuple[str, str]


class ObservedProfiles(Mapping[_Key, Profile]):
    """Profiles that follow what is seen.

    Loads and batches each have a factor on what was measured, which leaves the ratios between batch sizes as they are.

    Args:
      measured: by architecture and processor.
    """

    def __init__(self, measured: Profiles):
        self._measured = measured
        self._corrected: dict[_Key, Profile] = {}
        self._factors: dict[tuple[_Key, str], float] = {}
        self._ratios: dict[tuple[_Key, str], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def __getitem__(self, key: _Key) -> Profile:
        return self._corrected.get(key) or self._measured[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._measured)

    def __len__(self) -> int:
        return len(self._measured)

    def note_load(self, key: _Key, tier: Tier, seconds: float) -> None:
        """Take into account what a load took, alone."""
        self._note(key, tier, seconds, self._measured[key].load_seconds(tier))

    def note_batch(self, key: _Key, size: int, seconds: float) -> None:
        """Take into account what a batch of this size took."""
        self._note(key, "batch", seconds, self._measured[key].seconds(size))

    def _note(self, key: _Key, what: str, seconds: float, expected: float) -> None:
        if not (seconds > 0 and expected > 0):  # as of a load that costs nothing
            return
        ratios = self._ratios[key, what]
        ratios.append(seconds / expected)
        factor, known = statistics.median(ratios), self._factors.get((key, what), 1.0)
        if len(ratios) >= LEAST and not 1 / DRIFT <= factor / known <= DRIFT:
            self._factors[key, what] = factor
            self._correct(key)

    def _correct(self, key: _Key) -> None:
        profile, batch = self._measured[key], self._factors.get((key, "batch"), 1.0)
        self._corrected[key] = profile.scaled(
            batch, {tier: self._factors.get((key, tier), 1.0) for tier in profile.load}
        )


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
