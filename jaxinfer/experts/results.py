"""The results of inputs, as users get them."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """An expert's answer to an input.

    Attributes:
      verdict: the word that rules route by.
    """

    verdict: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Judgement):
    """A classifier's answer; the verdict is the label of the most probable class.

    Attributes:
      probabilities: float32, of all classes, [classes].
    """

    probabilities: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection(Judgement):
    """A detector's answer, best first; the verdict is the label of the best box, or "none".

    Attributes:
      boxes: left, top, right and bottom in pixels of the input, float32 [N, 4].
      scores: float32 [N].
      labels: the boxes' labels.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingVector(Judgement):
    """An encoder's answer; the verdict is "done".

    Attributes:
      vector: float32 [D], as `Embedder` gives it.
    """

    vector: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """An expert's part of a result.

    Attributes:
      judgement: the expert's answer.
      executor: the name of the executor that ran it.
      batch: number of inputs judged together.
      waited: seconds from the request to its beginning.
      seconds: seconds that the batch took.
    """

    expert: str
    judgement: Judgement
    executor: str
    batch: int
    waited: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of an input.

    Attributes:
      stages: the stages of the experts that judged it, in order.
      latency: seconds since it was submitted.
    """

    stages: tuple[Stage, ...]
    latency: float

    @property
    def verdict(self) -> str:
        """The last expert's verdict."""
        return self.stages[-1].judgement.verdict
