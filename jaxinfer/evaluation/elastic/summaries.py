"""Summaries of runs: what tables of policies and figures show of them, small enough for a result's JSON."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.evaluation.elastic.runs import Run, batches_of

TIMES = 101
"""Number of times at which utility is summed, from 0 to the end."""
QUANTILES = np.linspace(0, 1, 51)
BINS = 100
"""Number of spans in which arrivals are counted."""


class PolicySummary(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A policy in a cell.

    Attributes:
      outcomes: shares of queries by `Outcome`, means of all seeds.
      levels: share of answers at each level, over all seeds; empty for a policy that chooses from something else.
      earned: utility up to each of `TIMES` times, as a share of all that there was to earn; the first seed's.
      batch_accuracy: quantiles, at `QUANTILES`, of the share of a batch that is right and in time; the first seed's.
    """

    outcomes: list[float]
    levels: dict[int, float]
    earned: list[float]
    batch_accuracy: list[float]


class CellSummary(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All policies under one load.

    Attributes:
      arrivals: the kind of arrivals.
      seeds, queries: number of runs of each policy, and of the first one's queries.
      load: arrival rate as a multiple of the capacity at level 0.
      clock: "wall" or "simulated".
      capacity: queries a second at level 0.
      seconds: when the last policy's last query ended, first seed.
      rates: queries a second in each of `BINS` equal spans until the last arrival, first seed.
      rates_until: the last arrival, in seconds.
      levels: the levels that policies choose from.
      policies: by name, in the order in which they are shown.
    """

    arrivals: str
    load: float
    clock: str
    seeds: int
    queries: int
    capacity: float
    seconds: float
    rates: list[float]
    rates_until: float
    levels: list[int]
    policies: dict[str, PolicySummary]


def summarise(runs: Sequence[Run]) -> CellSummary:
    """Summarise the runs of one cell, at least one, policies in the order in which they are shown."""
    by_policy: dict[str, list[Run]] = {}
    for run in runs:
        by_policy.setdefault(run.header.policy, []).append(run)
    header, first = runs[0].header, [same[0] for same in by_policy.values()]
    arrivals = np.array([answer.query.arrival for answer in runs[0].served.answers] or [0.0])
    until = max(float(arrivals.max()), 1e-9)
    seconds = max((answer.ended for run in first for answer in run.served.answers), default=until)
    return CellSummary(
        arrivals=header.arrivals,
        load=header.load,
        clock=header.clock,
        seeds=len(by_policy[header.policy]),
        queries=len(runs[0].served.answers),
        capacity=round(header.capacity, 1),
        seconds=round(seconds, 4),
        rates=_rounded(np.histogram(arrivals, BINS, (0, until))[0] * (BINS / until), 1),
        rates_until=round(until, 4),
        levels=list(header.profile.levels),
        policies={name: _summarise_policy(same, seconds, header.profile.levels) for name, same in by_policy.items()},
    )


def _summarise_policy(runs: Sequence[Run], seconds: float, levels: Sequence[int]) -> PolicySummary:
    chooses_levels = runs[0].header.profile.levels == levels
    counts = sum((run.served.levels for run in runs if chooses_levels), start=Counter[int]())
    answers = sorted(runs[0].served.answers, key=lambda answer: answer.ended)
    total = np.concatenate([[0.0], np.cumsum([answer.utility for answer in answers])])
    reached = np.searchsorted([answer.ended for answer in answers], np.linspace(0, seconds, TIMES), side="right")
    batches = batches_of(answers).values()
    right = [np.mean([answer.outcome is Outcome.CORRECT for answer in batch]) for batch in batches]
    return PolicySummary(
        outcomes=_rounded(np.array([[run.served.share(outcome) for outcome in Outcome] for run in runs]).mean(axis=0)),
        levels={level: round(counts[level] / counts.total(), 4) for level in sorted(counts)},
        earned=_rounded(total[reached] / (runs[0].served.best or 1.0)),
        batch_accuracy=_rounded(np.quantile(right, QUANTILES)) if right else [],
    )


def _rounded(values: np.ndarray, places: int = 4) -> list[float]:
    return [round(float(value), places) for value in values]
