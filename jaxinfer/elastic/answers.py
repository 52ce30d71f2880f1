"""The answers to images, as users get them."""

import dataclasses
from collections import Counter

import numpy as np

from jaxinfer.serving.statistics import Statistics


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Classification:
    """The answer to an image.

    Attributes:
      label: the label of the most probable class.
      probabilities: float32 [classes], of the task's classes.
      level: the level it was classified at.
    """

    label: str
    probabilities: np.ndarray
    level: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answer(Classification):
    """The answer to a query.

    Attributes:
      queue_seconds: seconds from its arrival until its batch began.
      compute_seconds: seconds that its batch took.
      in_time: whether it was answered before its deadline.
      batch: the number of its batch, counted over the service's.
    """

    queue_seconds: float
    compute_seconds: float
    in_time: bool
    batch: int


@dataclasses.dataclass(kw_only=True)
class QueryStatistics(Statistics):
    """Counters of queries and their batches.

    Attributes:
      utility: total utility of queries answered in time, rightly or not.
      levels: the number of queries answered at each level.
      planning_seconds: time the controller took to batch queries and choose batches.
      fallbacks: number of batches chosen by a simpler rule because planning took too long.
    """

    utility: float = 0.0
    levels: Counter[int] = dataclasses.field(default_factory=Counter)
    planning_seconds: float = 0.0
    fallbacks: int = 0
