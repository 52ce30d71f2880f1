"""What users get for their images."""

import dataclasses

import numpy as np


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
