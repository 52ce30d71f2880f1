"""Results of a measurement: samples in seconds, and the distributions that reports and tables show."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
    """Summary of a sample, in seconds; percentiles interpolate linearly."""

    samples: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float

    @classmethod
    def from_samples(cls, values: Sequence[float]) -> "Distribution | None":
        """Summarise `values`; None if there are none."""
        if not values:
            return None
        p50, p90, p95, p99 = map(float, np.percentile(values, (50, 90, 95, 99)))
        mean = float(np.mean(values))
        return cls(samples=len(values), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, min=min(values), max=max(values))


STATISTICS = ("mean", "p50", "p90", "p95", "p99", "min", "max")
"""Fields of `Distribution`, in the order of the tables' rows."""

METRICS = {
    "end_to_end_s": "end-to-end",
    "first_token_s": "time to first token",
    "per_output_token_s": "time per output token",
    "inter_token_s": "inter-token latency",
}
"""Sampled attributes of `Latency` and `Throughput` -> their names in tables and plots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """The unmeasured runs before a measurement.

    Attributes:
      seconds: wall-clock time.
      compile_s: sum over `programs`; several compile at a time, so it can exceed `seconds`.
      programs: seconds to compile each program, or to read it from the disk cache ("decode: batch=8, pages=16" -> 1.5).
    """

    seconds: float
    compile_s: float
    programs: dict[str, float]


@dataclasses.dataclass(kw_only=True)
class LatencyResult:
    """Samples of one batch size, in seconds, appended to after every round.

    Attributes:
      batch: requests per round.
      output_tokens: output tokens of each request.
      end_to_end_s: from the call of `LLM.generate` until it returns; one per round.
      first_token_s: from queueing until the first token is on the host; one per request.
      per_output_token_s: the rest of the request's time, divided by its tokens after the first; one per request. One
        dispatch decodes several tokens, so this is a mean, not the time between two tokens that a caller sees.
      inter_token_s: between two outputs of a request under `LLM.stream(max_passes=1)`, which yields every token as it
        is generated, at the cost of a dispatch each; measured in rounds of its own, because it slows the others down.
      total_output_tokens: output tokens of the rounds in `end_to_end_s`.
    """

    batch: int
    output_tokens: int
    end_to_end_s: list[float] = dataclasses.field(default_factory=list)
    first_token_s: list[float] = dataclasses.field(default_factory=list)
    per_output_token_s: list[float] = dataclasses.field(default_factory=list)
    inter_token_s: list[float] = dataclasses.field(default_factory=list)
    total_output_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens divided by end-to-end time."""
        return self.total_output_tokens / sum(self.end_to_end_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """Requests that were all queued at once.

    Attributes:
      seconds: from the call until the last request is finished.
      prompt_tokens: prompt tokens of all requests.
      output_tokens: output tokens of all requests.
      end_to_end_s: since queueing, including the wait for a free slot; one per request.
      first_token_s: since queueing, including the wait for a free slot; one per request.
      per_output_token_s: as in `Latency`.
      timeline: (seconds since the call, output tokens so far), one entry whenever an output grew.
      idle_share: of the ticks of a pipeline's stages, from 0 to 1; None without stages.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    end_to_end_s: list[float]
    first_token_s: list[float]
    per_output_token_s: list[float]
    timeline: list[tuple[float, int]]
    idle_share: float | None = None

    @property
    def requests(self) -> int:
        return len(self.end_to_end_s)

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds
