"""Traces of queries: their arrivals, tasks, utilities and deadlines."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.evaluation import traces


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryKind:
    """Queries that are alike (OTAS, Table II).

    Attributes:
      share: their frequency, relative to the others.
    """

    task: str
    latency: float
    utility: float
    share: float = 1.0


def table_ii(tasks: Sequence[str]) -> list[QueryKind]:
    """The paper's two kinds for each task: those of CIFAR-10, CIFAR-100, EuroSAT, and so on in turn.

    Every second task's queries have higher utility.
    """
    worth = ((0.3, 0.01), (1.0, 0.2))
    return [
        QueryKind(task=task, latency=latency, utility=utility)
        for place, task in enumerate(tasks)
        for latency, utility in zip((0.6, 1.0), worth[place % 2], strict=True)
    ]


def wandering_arrivals(rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Draw the paper's synthetic trace: Poisson arrivals at a rate that wanders between 0.57 and 2 times the mean.

    The rate changes each second.

    Args:
      rate: the mean, in queries a second; the paper's is 350, between 200 and 700.
      seconds: duration of the trace.
      seed: seed of all that is drawn.
    """
    rng = np.random.default_rng(seed)
    level, arrived = 0.0, []
    for second in range(int(np.ceil(seconds))):
        level = 0.9 * level + np.sqrt(1 - 0.9**2) * 0.35 * rng.standard_normal()
        now = np.clip(np.exp(level), 200 / 350, 700 / 350) * rate
        arrived.append(second + rng.random(rng.poisson(now)))
    arrivals = np.sort(np.concatenate(arrived)) if arrived else np.zeros(0)
    return _with_mean(arrivals, rate, seconds)


def bursty_arrivals(rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Draw arrivals like those of Azure Functions in 2021 when two minutes become one second (OTAS, Fig. 8b).

    The original trace is not available; this generator has its published statistics: a daily rhythm of 720 seconds, a
    wandering rate, and bursts. For the arguments see `wandering_arrivals`.
    """
    rng = np.random.default_rng(seed)
    state, arrived = rng.standard_normal(), []
    for second in range(int(np.ceil(seconds))):
        state = 0.9 * state + np.sqrt(0.19) * rng.standard_normal()
        now = 200 * np.exp(0.42 * state + 0.58 * np.sin(2 * np.pi * second / 720))
        if rng.random() < 0.02:
            now *= rng.uniform(1.5, 2.5)
        arrived.append(second + rng.random(rng.poisson(min(now, 1200.0))))
    arrivals = np.sort(np.concatenate(arrived)) if arrived else np.zeros(0)
    return _with_mean(arrivals, rate, seconds)


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Draw arrivals at a steady rate; for the arguments see `wandering_arrivals`."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))


def _with_mean(arrivals: np.ndarray, rate: float, seconds: float) -> np.ndarray:
    """Thin out or compress arrivals to `rate` a second over these seconds."""
    if not len(arrivals):
        return arrivals
    count, length = round(rate * seconds), float(np.ceil(seconds))
    repeats = -(-count // len(arrivals))
    # Copies of a trace are shifted by less than a second, so that together they are as bursty as one.
    rng = np.random.default_rng(len(arrivals))
    copies = np.concatenate([arrivals, *(arrivals + rng.uniform(-0.5, 0.5, len(arrivals)) for _ in range(repeats - 1))])
    chosen = rng.permutation(len(copies))[:count]
    return np.sort(np.clip(copies[chosen], 0.0, length) * (seconds / length))


ARRIVALS: Mapping[str, Callable[..., np.ndarray]] = {
    "wandering": wandering_arrivals,
    "bursty": bursty_arrivals,
    "poisson": poisson_arrivals,
}


def arrivals_at(
    arrivals: Callable[..., np.ndarray], rate: float, seconds: float, *, seed: int, scale: float
) -> np.ndarray:
    """Draw arrivals for a device that is 1 / `scale` times as fast as the paper's: they wander as many times as fast.

    Args:
      arrivals: one of `ARRIVALS`, or a similar function.
      rate: see `wandering_arrivals`.
      seconds: see `wandering_arrivals`.
      seed: see `wandering_arrivals`.
      scale: factor on time.
    """
    return scale * arrivals(rate * scale, seconds / scale, seed=seed)


def make_queries(arrivals: np.ndarray, kinds: Sequence[QueryKind], *, seed: int, scale: float = 1.0) -> list[Query]:
    """Make a query of a random kind for each arrival.

    Args:
      arrivals: seconds, ascending.
      kinds: the kinds to draw from.
      seed: seed of all that is drawn.
      scale: factor on latencies, for a device that takes another time for a batch than the paper's.
    """
    rng, shares = np.random.default_rng((seed, 1)), np.array([kind.share for kind in kinds])
    drawn = rng.choice(len(kinds), len(arrivals), p=shares / shares.sum())
    return [
        Query(
            id=index,
            task=kinds[kind].task,
            arrival=float(arrival),
            latency=scale * kinds[kind].latency,
            utility=kinds[kind].utility,
        )
        for index, (arrival, kind) in enumerate(zip(arrivals, drawn, strict=True))
    ]


def burstiness(arrivals: np.ndarray) -> Mapping[str, float]:
    """Measure how arrivals bunch: mean rate, index of dispersion of counts in 1, 10 and 60 s, and so on.

    A Poisson process has dispersion 1 and a coefficient of variation between arrivals of 1.
    """
    if len(arrivals) < 2:
        return {"rate": 0.0}
    span, gaps = float(arrivals[-1]), np.diff(arrivals)
    measured = {"rate": len(arrivals) / span, "cv": float(gaps.std() / gaps.mean())}
    for window in (1, 10, 60):
        if span < 2 * window:
            break
        counts = np.bincount((arrivals / window).astype(int))[: max(int(span // window), 1)]
        measured[f"dispersion_{window}s"] = float(counts.var() / counts.mean())
        if window == 1:
            measured["peak_to_mean"] = float(counts.max() / counts.mean())
            varies = len(counts) > 2 and counts[:-1].std() and counts[1:].std()
            measured["lag_1"] = float(np.corrcoef(counts[:-1], counts[1:])[0, 1]) if varies else 0.0
    return measured


def read_trace(file: str | os.PathLike[str]) -> list[Query]:
    """Read a trace of queries (see `evaluation.traces`). Raises ValueError that names file and line."""
    return traces.read_trace(file, Query, name="a query")
