"""What users get for their images."""

import dataclasses
from collections import Counter

import numpy as np

from jaxinfer.serving.statistics import Statistics


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Classification:
    """The answer to an image.

    Attributes:
      label: of the most probable class.
      probabilities: of the task's classes, float32 [classes].
      level: that it was classified at.
    """

    label: str
    probabilities: np.ndarray
    level: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answer(Classification):
    """The answer to a query.

    Attributes:
      queue_seconds: from its arrival to when its batch began.
      compute_seconds: of its batch.
      in_time: whether it was there before its deadline.
      batch: counts the service's batches: that which it was in.
    """

    queue_seconds: float
    compute_seconds: float
    in_time: bool
    batch: int


@dataclasses.dataclass(kw_only=True)
class QueryStatistics(Statistics):
    """What became of queries, and of the batches that they were in.

    Attributes:
      utility: of the queries that were answered in time, whether rightly or not.
      levels: queries answered at each level.
      planning_seconds: of the controller: putting queries into batches, and choosing what runs.
      fallbacks: how many batches a simpler rule has chosen, since planning took too long.
    """

    utility: float = 0.0
    levels: Counter[int] = dataclasses.field(default_factory=Counter)
    planning_seconds: float = 0.0
    fallbacks: int = 0
