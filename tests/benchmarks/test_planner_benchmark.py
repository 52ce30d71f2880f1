"""The cells of `benchmarks.planner`, and their errors."""

import numpy as np
import pytest

from benchmarks.pages.planner import simulator_section
from benchmarks.planner.__main__ import PARTS
from benchmarks.planner.accuracy import _check, cell_row
from benchmarks.planner.peer import peer
from benchmarks.planner.settings import ENGINES, NEAR_SATURATION, Lengths, Load, Settings
from benchmarks.report import Report
from jaxinfer.evaluation.generation.replay import Replayed
from jaxinfer.evaluation.serving.client import RequestRecord


def test_there_are_enough_cells_of_all_kinds():
    loads = [load for engine in ENGINES for group in engine.groups for load in group]
    assert len(loads) >= 20
    assert sum(load.load >= NEAR_SATURATION for load in loads) >= 5
    assert {load.arrivals for load in loads} == {"poisson", "conv", "code"}
    assert len({engine.batch for engine in ENGINES}) > 1
    assert len({load.lengths for load in loads}) > 3
    assert {load.shared for load in loads} == {0.0, 0.5, 0.8}
    assert any(engine.tiered for engine in ENGINES)


@pytest.mark.parametrize("arrivals", ["poisson", "conv", "at once"])
def test_requests_are_drawn(arrivals):
    load = Load(Lengths(40, 10), arrivals, 0.5, shared=0.5)
    requests = load.requests(100, 20.0, np.random.default_rng(0))
    assert len(requests) == 100
    assert len({tuple(request.prompt[:20]) for request in requests}) == 1
    assert len({tuple(request.prompt) for request in requests}) == 100
    assert 30 < np.mean([len(request.prompt) for request in requests]) < 50
    assert 8 < np.mean([request.output_tokens for request in requests]) < 12
    last = requests[-1].arrival
    assert last == 0.0 if arrivals == "at once" else last == pytest.approx(10.0, rel=0.3)


def replayed(*seconds):
    records = [RequestRecord(arrival=0.0, events=[s, 2 * s], prompt_tokens=4, output_tokens=2) for s in seconds]
    return Replayed(records=records, preemptions=0, cached_tokens=2, steps=2)


def test_a_cell_compares_means_with_the_median_run():
    load = Load(Lengths(40, 10), "poisson", 0.95)
    row = cell_row(
        "demo, batch 8", load, replayed(0.011, 0.011), [replayed(0.01, 0.01), replayed(1.0), replayed(0.001)]
    )
    assert row["cell"] == "40 + 10 tokens, poisson at 95%"
    assert (row["ttft_ms"], row["predicted_ttft_ms"], row["e2e_ms"]) == (10.0, 11.0, 20.0)
    assert [row[f"error_{name}"] for name in ("ttft_ms", "tpot_ms", "e2e_ms")] == pytest.approx([0.1] * 3)
    report = Report()
    _check(report, [row, row | {"error_ttft_ms": -0.5, "cell": "other"}])
    assert {check.name: check.value for check in report.checks}["ttft_error_median"] == pytest.approx(0.3)
    worst = next(row for row in report.rows if row["metric"] == "ttft")
    assert worst == {"figure": "worst", "metric": "ttft", "error": -0.5, "cell": "demo, batch 8: other"}
    text = "\n".join(simulator_section({**report.result(), "rows": [row, *report.rows]}))
    assert "| demo, batch 8 | 40 + 10 tokens, poisson at 95% | 20, 22, +10% |" in text
    assert "| ttft | -50% | demo, batch 8: other |" in text


def test_a_peer_predicts_the_points_of_dense_models(tmp_path):
    """A command in place of AISimulate, which is right."""
    command = tmp_path / "aisimulate"
    command.write_text("#!/bin/sh\necho noise\necho '{\"output_throughput_tok_s\": 27911}'\n")
    command.chmod(0o755)
    report = Report()
    peer(report, Settings(quick=True, folder=tmp_path, aisimulate_python=tmp_path / "python"))
    row, errors = report.rows
    assert (row["name"], row["measured"], row["aisimulate"]) == ("llama-3.1-8b, 1 H200, 128/128", 27911, 27911)
    assert 0 < errors["jaxinfer"] < 0.2
    assert errors["aisimulate"] == 0
    assert any("AISimulate" in text for text in simulator_section(report.result()))
    peer(empty := Report(), Settings(quick=True, folder=tmp_path, aisimulate_python=tmp_path / "none/python"))
    assert not empty.rows


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    report = Report()
    for part in PARTS.values():
        part(report, Settings(quick=True, folder=tmp_path, aisimulate_python=tmp_path / "none/python"))
    assert sum(row["figure"] == "cell" for row in report.rows) == 3
    latencies = {f"{name}_error_median" for name in ("e2e", "ttft", "tpot")}
    assert {check.name for check in report.checks} >= latencies | {"configs_per_s", "figures_within_tolerance"}
    assert {row["metric"] for row in report.rows if row["figure"] == "worst"} == {"e2e", "ttft", "tpot"}
