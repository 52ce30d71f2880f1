"""The controllers' knowledge of the levels: batch latency and accuracy."""

import bisect
import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingProfile:
    """Measured latency and accuracy, never guessed.

    Attributes:
      levels: the levels, ascending.
      sizes: the sizes that batches are padded to, ascending.
      seconds: 95th percentile of a batch's seconds, by level and padded size.
      accuracy: share of right answers, by task and level; all tasks have all levels.
    """

    levels: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: Mapping[tuple[int, int], float]
    accuracy: Mapping[tuple[str, int], float]

    def __post_init__(self) -> None:
        timed = [(level, size) for level in self.levels for size in self.sizes]
        judged = [(task, level) for task in self.tasks for level in self.levels]
        for name, keys in (("seconds", timed), ("accuracy", judged)):
            if missing := [key for key in keys if key not in getattr(self, name)]:
                raise ValueError(f"a profile needs the {name} of {missing[0]}, which were not measured.")

    @functools.cached_property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of the profile."""
        return tuple(dict.fromkeys(task for task, _ in self.accuracy))

    def padded(self, count: int) -> int:
        """The size that a batch of `count` queries is padded to."""
        return self.sizes[bisect.bisect_left(self.sizes, count)]

    def batch_seconds(self, level: int, count: int) -> float:
        """Compute the seconds of a batch of `count` queries."""
        return self.seconds[level, self.padded(count)]

    def accuracy_at(self, task: str, level: int) -> float:
        """Compute the probability that an answer is right."""
        return self.accuracy[task, level]

    def capacity(self, level: int = 0) -> float:
        """Compute the queries a second in full batches."""
        return self.sizes[-1] / self.seconds[level, self.sizes[-1]]

    def fastest(self, count: int) -> float:
        """Compute the seconds of `count` queries at the fastest level."""
        return min(self.batch_seconds(level, count) for level in self.levels)

    def best(self, task: str) -> float:
        """Compute the best accuracy of a task at any level."""
        return max(self.accuracy_at(task, level) for level in self.levels)

    def at_levels(self, levels: Collection[int]) -> Self:
        """A profile of these levels alone."""
        accuracy = {(task, level): right for (task, level), right in self.accuracy.items() if level in levels}
        return dataclasses.replace(self, levels=tuple(n for n in self.levels if n in levels), accuracy=accuracy)
