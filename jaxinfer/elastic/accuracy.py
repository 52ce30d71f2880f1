"""A task's accuracy by level, with its statistical error."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import numpy as np

TIE = 1e-6
"""Share by which a level counts as more accurate than the next lower one when they are equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelAccuracy:
    """Answers at a level, compared with those at level 0 to the same images.

    Attributes:
      images: number of images classified.
      correct: number of right answers.
      gained: number of images that only this level classified rightly.
      lost: number of images that only level 0 classified rightly.
      adaptation: the level's token adaptation; another one has another accuracy.
    """

    images: int
    correct: int
    gained: int
    lost: int
    adaptation: str

    @classmethod
    def from_correct(cls, correct: np.ndarray, plain: np.ndarray, adaptation: str) -> Self:
        """Count right answers, bool [N], at this level and at level 0."""
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
        """The standard error of `accuracy`, by Agresti and Coull: not 0 even if all answers are right."""
        n = self.images + 4
        p = (self.correct + 2) / n
        return math.sqrt(p * (1 - p) / n)

    @property
    def difference(self) -> float:
        """The accuracy minus that of level 0."""
        return (self.gained - self.lost) / self.images

    @property
    def difference_error(self) -> float:
        """The standard error of `difference`, for paired answers."""
        changed = self.gained + self.lost
        return math.sqrt(max(changed - (self.gained - self.lost) ** 2 / self.images, 0.0)) / self.images

    @property
    def p_value(self) -> float:
        """Probability of so large a difference if the level makes none: McNemar's exact test, two-sided."""
        from scipy.stats import binomtest  # takes a second to import

        changed = self.gained + self.lost
        return float(binomtest(self.gained, changed).pvalue) if changed else 1.0


def expected_accuracies(levels: Sequence[LevelAccuracy]) -> list[float]:
    """Estimate the accuracy at each level for plans, from measurements.

    More tokens are assumed to be no worse: a level less accurate than a lower one by at most its standard error is so
    by chance. Among equal levels the one with more tokens is a little better, so that an idle device chooses it.

    Args:
      levels: a task's measurements, ascending.
    """
    expected: list[float] = []
    for level in levels:
        best = max(expected, default=0.0)
        chance = level.accuracy < best <= level.accuracy + level.standard_error
        expected.append((best if chance else level.accuracy) * (1 + TIE))
    return expected
