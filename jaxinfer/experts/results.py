"""What users get for their inputs."""

import dataclasses

from jaxinfer.experts.execution.kinds import Judgement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """An expert's part of a result.

    Attributes:
      judgement: its answer.
      executor: where it ran.
      batch: how many inputs it judged together.
      waited: seconds until it began, from when it was asked.
      seconds: of the batch.
    """

    expert: str
    judgement: Judgement
    executor: str
    batch: int
    waited: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of an input.

    Attributes:
      stages: of all experts that judged it, in their order.
      latency: seconds from when it was submitted.
    """

    stages: tuple[Stage, ...]
    latency: float

    @property
    def verdict(self) -> str:
        """The last expert's."""
        return self.stages[-1].judgement.verdict
