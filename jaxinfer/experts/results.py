"""The results of inputs, as users get them."""

import dataclasses

from jaxinfer.experts.execution.kinds import Judgement


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
