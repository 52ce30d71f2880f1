"""What controllers know of the levels: how long batches take, and how often answers are right."""

import bisect
import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingProfile:
    """Measured; never guessed.

    Attributes:
      levels: ascending.
      sizes: that batches are padded to, ascending.
      seconds: of a batch by level and padded size, padding included: what nearly all batches keep to (p95).
      accuracy: the share of right answers by task and level; a level that a task does not have is missing.
    """

    levels: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: Mapping[tuple[int, int], float]
    accuracy: Mapping[tuple[str, int], float]

    def __post_init__(self) -> None:
        missing = [(level, size) for level in self.levels for size in self.sizes if (level, size) not in self.seconds]
        if missing:
            raise ValueError(f"a profile needs the seconds of each level and size; {missing[0]} is missing.")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those that it knows."""
        return tuple(dict.fromkeys(task for task, _ in self.accuracy))

    def batch_seconds(self, level: int, count: int) -> float:
        """Of so many queries."""
        return self.seconds[level, self.sizes[bisect.bisect_left(self.sizes, count)]]

    def right(self, task: str, level: int) -> float:
        """How likely an answer is right; level 0 stands for levels that the task does not have."""
        found = self.accuracy.get((task, level))
        return self.accuracy[task, 0] if found is None else found

    def capacity(self, level: int = 0) -> float:
        """Queries a second in full batches."""
        return self.sizes[-1] / self.seconds[level, self.sizes[-1]]

    def fastest(self, count: int) -> float:
        """Seconds of so many queries at the fastest level."""
        return min(self.batch_seconds(level, count) for level in self.levels)

    def best(self, tasks: Sequence[str]) -> Mapping[str, float]:
        """The best accuracy of each task at any level."""
        return {task: max(self.right(task, level) for level in self.levels) for task in tasks}
