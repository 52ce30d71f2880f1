"""What controllers know of the levels: how long batches take, and how often answers are right."""

import bisect
import dataclasses
import functools
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingProfile:
    """Measured; never guessed.

    Attributes:
      levels: ascending.
      sizes: that batches are padded to, ascending.
      seconds: of a batch by level and padded size, padding included: what nearly all batches keep to (p95).
      accuracy: the share of right answers by task and level; all tasks have all levels.
    """

    levels: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: Mapping[tuple[int, int], float]
    accuracy: Mapping[tuple[str, int], float]

    def __post_init__(self) -> None:
        timed = [(level, size) for level in self.levels for size in self.sizes]
        judged = [(task, level) for task in self.tasks for level in self.levels]
        for name, wanted in (("seconds", timed), ("accuracy", judged)):
            if missing := [key for key in wanted if key not in getattr(self, name)]:
                raise ValueError(f"a profile needs the {name} of {missing[0]}, which were not measured.")

    @functools.cached_property
    def tasks(self) -> tuple[str, ...]:
        """Those that it knows."""
        return tuple(dict.fromkeys(task for task, _ in self.accuracy))

    def padded(self, count: int) -> int:
        """The size that a batch of so many queries has on the device."""
        return self.sizes[bisect.bisect_left(self.sizes, count)]

    def batch_seconds(self, level: int, count: int) -> float:
        """Of so many queries."""
        return self.seconds[level, self.padded(count)]

    def right(self, task: str, level: int) -> float:
        """How likely an answer is right."""
        return self.accuracy[task, level]

    def capacity(self, level: int = 0) -> float:
        """Queries a second in full batches."""
        return self.sizes[-1] / self.seconds[level, self.sizes[-1]]

    def fastest(self, count: int) -> float:
        """Seconds of so many queries at the fastest level."""
        return min(self.batch_seconds(level, count) for level in self.levels)

    def best(self, task: str) -> float:
        """The best accuracy of a task at any level."""
        return max(self.right(task, level) for level in self.levels)
