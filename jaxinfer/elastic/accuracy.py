"""How often a task's answers are right, by level, and how sure that is."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import numpy as np

TIE = 1e-6
"""By which share each level is taken to be more accurate than the next lower one that is equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelAccuracy:
    """The answers at a level, beside those at level 0 to the same images.

    Attributes:
      images: how many were classified.
      correct: how many of them rightly.
      gained, lost: how many only this level, or only level 0, classified rightly.
      adaptation: what the level did; another one has another accuracy.
    """

    images: int
    correct: int
    gained: int
    lost: int
    adaptation: str

    @classmethod
    def of(cls, correct: np.ndarray, plain: np.ndarray, adaptation: str) -> Self:
        """From which images were classified rightly, bool [N], at this level and at level 0."""
        return cls(
            images=len(correct),
            correct=int(correct.sum()),
            gained=int((correct & ~plain).sum()),
            lost=int((plain & ~correct).sum()),
            adaptation=adaptation,
        )

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.correct / self.images

    @property
    def standard_error(self) -> float:
        """Of `accuracy`; by Agresti and Coull, so that it is not 0 where all answers are right."""
        n = self.images + 4
        p = (self.correct + 2) / n
        return math.sqrt(p * (1 - p) / n)

    @property
    def difference(self) -> float:
        """The accuracy less that of level 0."""
        return (self.gained - self.lost) / self.images

    @property
    def difference_error(self) -> float:
        """The standard error of `difference`, of pairs."""
        changed = self.gained + self.lost
        return math.sqrt(max(changed - (self.gained - self.lost) ** 2 / self.images, 0.0)) / self.images

    @property
    def p_value(self) -> float:
        """How likely so large a difference is if the level makes none: McNemar's exact test, two-sided."""
        changed, fewer = self.gained + self.lost, min(self.gained, self.lost)
        tail = sum(math.comb(changed, k) for k in range(fewer + 1)) / 2**changed
        return min(1.0, 2 * tail)


def expected_accuracies(levels: Sequence[LevelAccuracy]) -> list[float]:
    """How often answers are right at each level, as plans take it, from what was measured.

    More tokens are taken to be no worse: where a level was less accurate than a lower one by no more than its standard
    error, that was chance. Of equal levels the one with more tokens is a little better, so that a device that is idle
    takes it.

    Args:
      levels: of a task, ascending.
    """
    found: list[float] = []
    for level in levels:
        best = max(found, default=0.0)
        chance = level.accuracy < best <= level.accuracy + level.standard_error
        found.append((best if chance else level.accuracy) * (1 + TIE))
    return found
