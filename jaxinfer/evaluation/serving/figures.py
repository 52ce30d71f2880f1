"""The figures of a load, as `vllm bench serve` defines them, except that an open loop's latencies begin at arrivals."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxinfer.evaluation.serving.client import RequestRecord, count_errors

PERCENTILES = (50, 90, 99)

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
"""Sampled attributes of `Samples`, and their names in tables and plots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The limits that a good request keeps (service-level objective); None: no limit.

    Attributes:
      ttft_ms: its time to first token, at most.
      tpot_ms: its time per output token, at most.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_kept(self, record: RequestRecord) -> bool:
        """Check whether a request came to its end and kept both."""
        if record.error:
            return False
        ttft_kept = self.ttft_ms is None or ttft_ms(record) <= self.ttft_ms
        return ttft_kept and (self.tpot_ms is None or (tpot_ms(record) or 0.0) <= self.tpot_ms)


def ttft_ms(record: RequestRecord) -> float:
    """The time to first token: milliseconds from arrival to the first event with text."""
    return 1e3 * ((record.events[0] if record.events else record.ended) - record.arrival)


def e2e_ms(record: RequestRecord) -> float:
    """The end-to-end latency: milliseconds from arrival to the last event with text."""
    return 1e3 * ((record.events[-1] if record.events else record.ended) - record.arrival)


def tpot_ms(record: RequestRecord) -> float | None:
    """The time per output token: what follows the first token, over the tokens after it; None for one token."""
    if record.output_tokens < 2:
        return None
    return (e2e_ms(record) - ttft_ms(record)) / (record.output_tokens - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Latencies in milliseconds of all requests that came to their end.

    Attributes:
      ttft_ms: as `ttft_ms`; one per request.
      tpot_ms: as `tpot_ms`; one per request of two tokens or more.
      itl_ms: inter-token latency: between two events of a request. An event may have several tokens.
      e2e_ms: as `e2e_ms`; one per request.
    """

    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    e2e_ms: list[float]

    @classmethod
    def from_records(cls, records: Sequence[RequestRecord]) -> "Samples":
        """Take the latencies of the requests without errors."""
        good = [record for record in records if not record.error]
        return cls(
            ttft_ms=[ttft_ms(record) for record in good],
            tpot_ms=[value for record in good if (value := tpot_ms(record)) is not None],
            itl_ms=[gap for record in good for gap in (1e3 * np.diff(record.events)).tolist()],
            e2e_ms=[e2e_ms(record) for record in good],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSummary:
    """The figures of a load.

    Attributes:
      requests: requests that came to their end.
      errors: the others, by kind.
      seconds: from the start of the load to the end of the last request, with errors.
      prompt_tokens: of the requests that came to their end.
      output_tokens: of the same.
      requests_per_s: requests / seconds.
      output_tokens_per_s: output_tokens / seconds.
      goodput: requests per second that kept the objective; None without one.
      percentiles: p50, p90 and p99 of each of `LATENCIES`, in milliseconds, by linear interpolation; without samples
        there are none.
      client_lag_ms: p99 of what the client was late in sending. Latencies of an open loop include it.
    """

    requests: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    goodput: float | None
    percentiles: dict[str, dict[str, float]]
    client_lag_ms: float


def summarise(records: Sequence[RequestRecord], objective: Objective) -> LoadSummary:
    """Compute the figures of a load of at least one request."""
    good = [record for record in records if not record.error]
    seconds, tokens = max(record.ended for record in records), sum(record.output_tokens for record in good)
    samples = Samples.from_records(records)
    kept = sum(map(objective.is_kept, records))
    return LoadSummary(
        requests=len(good),
        errors=count_errors(list(records)),
        seconds=seconds,
        prompt_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=tokens,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=tokens / seconds,
        goodput=None if objective == Objective() else kept / seconds,
        percentiles={name: _percentiles(values) for name in LATENCIES if (values := getattr(samples, name))},
        client_lag_ms=1e3 * float(np.percentile([record.sent - record.arrival for record in records], 99)),
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{rank}": float(np.percentile(values, rank)) for rank in PERCENTILES}
