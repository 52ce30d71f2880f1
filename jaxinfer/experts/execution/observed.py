"""The costs of experts while a system runs: measured profiles, corrected by the times of real loads and batches."""

import time
from collections.abc import Iterator, Mapping

from jaxinfer.compiled import Clock, Drift
from jaxinfer.experts.scheduling.profile import Profile, Profiles, Tier
from jaxinfer.experts.scheduling.request import Batch, Load
from jaxinfer.experts.scheduling.scheduler import Scheduler

LEAST = 5
DRIFT = 1.05
"""Factor by which times must differ from those known to be corrected: less is noise."""
FORGET = 60.0
"""Seconds after which observations expire: slow copies to the host's memory, which stop being made, are tried again."""

type _Key = tuple[str, str]


class ObservedProfiles(Mapping[_Key, Profile]):
    """Profiles that follow observed times.

    Loads, evictions and batches each have a factor on what was measured, which keeps the ratios between batch sizes.

    Args:
      measured: the profiles by architecture and processor.
      clock: the time in seconds.
    """

    def __init__(self, measured: Profiles, *, clock: Clock = time.monotonic):
        self._measured, self._corrected = measured, dict[_Key, Profile]()
        self._drift: Drift[tuple[_Key, str]] = Drift(least=LEAST, tolerance=DRIFT, forget=FORGET, clock=clock)

    def __getitem__(self, key: _Key) -> Profile:
        return self._corrected.get(key) or self._measured[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._measured)

    def __len__(self) -> int:
        return len(self._measured)

    def note_load(self, key: _Key, tier: Tier, seconds: float) -> None:
        """Record the seconds of a load that has the disk to itself."""
        self._note(key, tier, seconds, self._measured[key].load_seconds(tier))

    def note_eviction(self, key: _Key, seconds: float) -> None:
        """Record the seconds of a copy to the host's memory."""
        self._note(key, "evict", seconds, self._measured[key].evict)

    def note_batch(self, key: _Key, size: int, seconds: float) -> None:
        """Record the seconds of a batch of this size."""
        self._note(key, "batch", seconds, self._measured[key].seconds(size))

    def _note(self, key: _Key, what: str, seconds: float, expected: float) -> None:
        if not (seconds > 0 and expected > 0):  # such as a load that costs nothing
            return
        if self._drift.note((key, what), seconds / expected):
            factors: dict[_Key, dict[str, float]] = {}
            for (profile, part), factor in self._drift.factors.items():
                factors.setdefault(profile, {})[part] = factor
            self._corrected = {profile: self._measured[profile].scaled(parts) for profile, parts in factors.items()}


class LoadTimes:
    """The seconds that loads would take alone: concurrent loads each get a part of the time.

    Loads from one disk slow one another; the time from beginning to end would count the others' share too.
    """

    def __init__(self) -> None:
        self._seconds: dict[Load, float] = {}
        self._counted = 0.0

    def begin(self, load: Load, now: float) -> None:
        """Begin to count a load's time."""
        self._count(now)
        self._seconds[load] = 0.0

    def end(self, load: Load, now: float) -> float | None:
        """Stop counting a load's time; return its seconds, or None if it never began."""
        self._count(now)
        return self._seconds.pop(load, None)

    def _count(self, now: float) -> None:
        for load in self._seconds:
            self._seconds[load] += (now - self._counted) / len(self._seconds)
        self._counted = now


class Observer:
    """Reporter of the real times of a scheduler's actions to profiles. One thread at a time."""

    def __init__(self, scheduler: Scheduler, profiles: ObservedProfiles):
        self._scheduler, self._profiles, self._loads = scheduler, profiles, LoadTimes()

    def load_begins(self, load: Load, now: float) -> None:
        """Note that a load begins, after the experts that make room for it have left."""
        self._loads.begin(load, now)

    def load_ended(self, load: Load, now: float, *, loaded: bool) -> None:
        """Note that a load has ended; a failed one does not tell what loads take."""
        if (alone := self._loads.end(load, now)) is not None and loaded:
            self._profiles.note_load(self._key(load.executor, load.expert), load.tier, alone)

    def batch_ended(self, batch: Batch, seconds: float) -> None:
        """Note that a batch has run."""
        self._profiles.note_batch(self._key(batch.executor, batch.expert), len(batch.requests), seconds)

    def copied(self, executor: int, expert: str, seconds: float) -> None:
        """Note that an expert was copied to the host's memory."""
        self._profiles.note_eviction(self._key(executor, expert), seconds)

    def _key(self, executor: int, expert: str) -> _Key:
        """The key of the profile of an expert on an executor."""
        scheduler = self._scheduler
        return scheduler.graph.experts[expert].architecture, scheduler.executors[executor].config.processor
