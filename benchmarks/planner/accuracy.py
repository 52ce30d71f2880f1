"""Latencies on the real engine, against those that the simulator predicted before."""

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.planner.settings import AT_ONCE, NEAR_SATURATION, EngineCells, Load, Settings
from benchmarks.report import Report
from jaxinfer.compiled import Costs
from jaxinfer.evaluation.generation.replay import Replayed, TokenRequest, replay
from jaxinfer.evaluation.generation.simulator import simulate
from jaxinfer.evaluation.generation.step_times import RecordedTimes
from jaxinfer.evaluation.generation.virtual_pages import TierTimes
from jaxinfer.evaluation.serving.figures import Samples
from jaxinfer.generation.api.loading import load_decoder
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.engine import Engine

METRICS = {"e2e_ms": ("e2e", 0.10), "ttft_ms": ("ttft", 0.20), "tpot_ms": ("tpot", 0.10)}
"""Latencies that are compared, the names of their checks, and the targets."""
CALIBRATION = (0.2, 0.5, 0.8)
"""Loads at which the engine is timed before a group is predicted, after requests that come at once."""
FEWEST, MOST = 16, 200
"""Requests of a load."""


class Measured:
    """An engine on this machine: runs loads, times its steps, and is simulated.

    Args:
      settings: the command's.
      engine: its model and its batch.
    """

    def __init__(self, settings: Settings, engine: EngineCells):
        self._settings = settings
        self._loaded = load_decoder(settings.model(engine.model), **engine.options)
        assert isinstance(self._loaded.engine, Engine)
        self.engine = self._loaded.engine
        self.engine.compile_ahead()
        self.capacity = 1.0  # requests a second, of the lengths that were calibrated last

    def run(self, requests: list[TokenRequest]) -> Replayed:
        """Run a load with an empty prefix cache."""
        for pool in self.engine.scheduler.pools:
            pool.clear()
        if (tier := self.engine.page_tier) is not None:
            tier.settle()
            tier.free_memory()
        return replay(self.engine, requests)

    def simulate(self, requests: list[TokenRequest]) -> Replayed:
        """Predict a load by the record of costs as it is now."""
        table, config, plan = self.engine.executor.costs.snapshot(), self.engine.config, self._loaded.plan
        assert isinstance(config, EngineConfig)
        assert plan is not None
        times, costs = RecordedTimes(table, plan), Costs(table.costs, learns=False)
        tier = TierTimes.from_costs(table) if plan.host_pages else None
        return simulate(requests, config, plan, times, costs=costs, platform=self._loaded.model.platform, tier=tier)

    def close(self) -> None:
        """Free its memory."""
        self.engine.close()
        self._loaded.reservation.release()

    def calibrate(self, load: Load, rng: np.random.Generator) -> None:
        """Time the steps of traffic of a load's lengths, and forget all others."""
        at_once = dataclasses.replace(load, arrivals=AT_ONCE)
        self.run(self._load(at_once, rng))  # programs are warm
        costs = self.engine.executor.costs
        for name, bucket in costs.snapshot().costs:
            costs.replace(name, bucket, ())
        for _ in range(2):  # steps whose time is unknown have one pass, so the first is slower
            requests = self._load(at_once, rng)
            done = self.run(requests)
            self.capacity = len(requests) / max(record.ended for record in done.records)
        for share in CALIBRATION:
            self.run(self.load(dataclasses.replace(load, arrivals="poisson", load=share), rng))

    def load(self, load: Load, rng: np.random.Generator) -> list[TokenRequest]:
        """Draw the requests of a load, as many as arrive in the seconds of the settings."""
        count = round(self._settings.seconds * load.load * self.capacity)
        return load.requests(min(max(count, FEWEST), MOST), self.capacity, rng)

    def _load(self, load: Load, rng: np.random.Generator) -> list[TokenRequest]:
        return load.requests(3 * self.engine.config.max_batch, self.capacity, rng)


def means(done: Replayed) -> dict[str, float]:
    """Compute the mean of each latency of a run, in milliseconds."""
    samples = Samples.from_records(done.records)
    return {name: statistics.mean(getattr(samples, name)) for name in METRICS}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Compute the median of each latency over runs."""
    return {name: statistics.median(run[name] for run in runs) for name in METRICS}


def cell_row(name: str, load: Load, predicted: Replayed, runs: list[Replayed]) -> dict[str, Any]:
    """Make the row of a cell: what was predicted, the median of the runs, and the errors."""
    expected, found = means(predicted), medians([means(run) for run in runs])
    row: dict[str, Any] = {"figure": "cell", "engine": name, "cell": str(load), "load": load.load}
    for metric in METRICS:
        row[metric] = round(found[metric], 2)
        row[f"predicted_{metric}"] = round(expected[metric], 2)
        row[f"error_{metric}"] = round(expected[metric] / found[metric] - 1, 4)
    row["hit_rate"], row["predicted_hit_rate"] = (round(run.hit_rate, 3) for run in (runs[0], predicted))
    row["preemptions"], row["predicted_preemptions"] = runs[0].preemptions, predicted.preemptions
    return row


def accuracy(report: Report, settings: Settings) -> None:
    """Measure all cells. Each is predicted before it runs."""
    rng = np.random.default_rng(0)
    rows = []
    for cells in settings.engines:
        start, name = time.monotonic(), str(cells)
        measured = Measured(settings, cells)
        print(f"{name}: {time.monotonic() - start:.0f} s to load and compile", flush=True)
        for group in cells.groups:
            measured.calibrate(group[0], rng)
            for load in group:
                requests = measured.load(load, rng)
                predicted = measured.simulate(requests)
                runs = [measured.run(requests) for _ in range(settings.rounds)]
                rows.append(cell_row(name, load, predicted, runs))
                report.row(**rows[-1], requests=len(requests))
                print(_line(rows[-1]), flush=True)
        measured.close()
    _check(report, rows)


def _line(row: dict[str, Any]) -> str:
    errors = ", ".join(f"{short} {row[f'error_{name}']:+.0%}" for name, (short, _) in METRICS.items())
    return f"{row['engine']}: {row['cell']}: {errors}"


def _check(report: Report, rows: list[dict[str, Any]]) -> None:
    """Check the median of the cells' errors, and name the worst cell of each latency."""
    for name, (short, target) in METRICS.items():
        errors = [abs(row[f"error_{name}"]) for row in rows]
        worst = rows[errors.index(max(errors))]
        error, cell = worst[f"error_{name}"], f"{worst['engine']}: {worst['cell']}"
        report.row(figure="worst", metric=short, error=error, cell=cell)
        print(f"largest error of {short}: {error:+.0%} ({cell})", flush=True)
        report.check(f"{short}_error_median", statistics.median(errors), "", target=target, better="lower")
    report.check("cells", len(rows), "cells", target=20)
    near = sum(row["load"] >= NEAR_SATURATION for row in rows)
    report.check("cells_near_saturation", near, "cells", target=5)
