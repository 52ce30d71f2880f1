"""The ways of an engine to time: the two that are fastest at short lengths.

All ways are tried the first time. Their seconds are remembered, so that the next run tries those that were fastest, and
others only if these have become slower than the others were, or so much faster that the record means nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import rich

from benchmarks.report import today
from jaxinfer.disk_cache import write_atomically

BEHIND = 1.25  # times the fastest way's seconds: when another is stopped
TRIED = 2  # number of ways that every run tries again
OUTDATED = 0.75  # of the remembered seconds of the fastest way: below, the machine was busy then

Way = dict[str, Any]
"""Keyword arguments of an engine's `throughput`."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The duration of a run in one way; if `stopped`, it was clearly behind another and would have taken longer."""

    way: Way
    seconds: float
    stopped: bool = False
    date: str = msgspec.field(default_factory=today)

    def __str__(self) -> str:
        name = ", ".join(f"{key} {value}" for key, value in self.way.items())
        return f"{name}: {'stopped after ' if self.stopped else ''}{self.seconds:.1f} s"


Measure = Callable[[Way, float | None], Trial]
"""Function that runs a way, and stops it after some seconds."""


def limit_after(trials: Sequence[Trial]) -> float | None:
    """The seconds after which another way is clearly behind the fastest of these; None if none has finished."""
    finished = [trial.seconds for trial in trials if not trial.stopped]
    return BEHIND * min(finished) if finished else None


def race(ways: Sequence[Way], remembered: Sequence[Trial], measure: Measure) -> list[Trial]:
    """Measure ways until no other can be the fastest, and return these trials, the fastest first.

    The order is that of their remembered seconds; ways without a record come first, in the order given. At least
    `TRIED` are measured, then all that were faster than the fastest is now; all if this is faster than ever.
    """

    def before(way: Way) -> float:
        return next((trial.seconds for trial in remembered if trial.way == way), 0.0)

    trials: list[Trial] = []
    for way in sorted(ways, key=before):
        fastest = min((trial.seconds for trial in trials), default=0.0)
        if len(trials) >= TRIED and OUTDATED * min(map(before, ways)) < fastest < before(way):
            break
        trials.append(measure(way, limit_after(trials)))
    return sorted(trials, key=lambda trial: (trial.stopped, trial.seconds))


class Memory:
    """The newest trial of every way, in a JSON file: {subject: trials, the fastest first}.

    A subject is everything that decides which way is best: the machine, the engine's version and dtype, the work.
    """

    def __init__(self, file: Path):
        self.file = file

    def recall(self, subject: str) -> list[Trial]:
        """The remembered trials."""
        return self._read().get(subject, [])

    def remember(self, subject: str, trials: Sequence[Trial]) -> None:
        """Add trials, which replace older ones of the same ways."""
        known = self._read()
        newer = [trial.way for trial in trials]
        kept = [trial for trial in known.get(subject, []) if trial.way not in newer]
        known[subject] = sorted([*trials, *kept], key=lambda trial: trial.seconds)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, msgspec.json.format(msgspec.json.encode(known), indent=1))

    def _read(self) -> dict[str, list[Trial]]:
        if not self.file.exists():
            return {}
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=dict[str, list[Trial]])
        except msgspec.DecodeError as error:
            rich.print(f"{self.file} is damaged ({error}): every way is tried again.")
            return {}
