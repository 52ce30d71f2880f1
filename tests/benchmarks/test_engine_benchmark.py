"""The engine benchmark without peers: its options, its workload and its checks."""

import argparse
import itertools
import math

import pytest

from benchmarks.engine import __main__ as engine
from benchmarks.engine import host, queues
from benchmarks.engine.__main__ import PARTS, read_parts
from benchmarks.engine.settings import Settings
from benchmarks.engine.step_gap import StepGaps
from benchmarks.engine.throughput import OUTPUT, PROMPT, check_agreement, make_workload
from benchmarks.report import Report
from jaxinfer.generation.engine.request import Sequence


def test_parts_are_chosen_by_name():
    assert read_parts("step_gap,prefix") == ["step_gap", "prefix"]
    with pytest.raises(argparse.ArgumentTypeError, match=f"unknown gap; there are {', '.join(PARTS)}"):
        read_parts("step_gap,gap")


def test_parts_that_a_file_has_besides_are_not_lost(tmp_path, monkeypatch):
    file = tmp_path / "engine.json"
    file.write_text(before := '{"rows": [{"figure": "part", "part": "prefix"}]}')
    monkeypatch.setattr("sys.argv", ["benchmarks.engine", "--only", "step_gap", "--json", str(file)])
    with pytest.raises(SystemExit, match="it has prefix as well, not measured now: name a new file"):
        engine.main()
    assert file.read_text() == before


def test_workload_lengths_are_proportional_to_the_scale():
    prompts, outputs = make_workload(16)
    halves, half_outputs = make_workload(16, scale=0.5)
    assert all(PROMPT / 2 <= len(prompt) <= 1.5 * PROMPT for prompt in prompts)
    assert all(OUTPUT / 2 <= count <= 1.5 * OUTPUT for count in outputs)
    for whole, half in zip([*map(len, prompts), *outputs], [*map(len, halves), *half_outputs], strict=True):
        assert abs(whole / 2 - half) <= 1


def test_engines_with_different_outputs_are_refused():
    ours = [[row] * 9 for row in range(20)]
    late = [[*tokens[:8], 99] for tokens in ours]
    check_agreement({"jaxinfer": ours, "peer": late})
    with pytest.raises(SystemExit, match="Only 85% of the outputs of peer start as jaxinfer's do"):
        check_agreement({"jaxinfer": ours, "peer": [[99] * 9] * 3 + ours[3:]})


def test_gaps_are_from_results_to_the_next_dispatch():
    gaps = StepGaps()
    gaps.dispatched, gaps.ready = [0.0, 1.5, 1.75], [1.0, 2.0, 3.0]
    assert gaps.seconds() == [0.5, 0.0]


@pytest.mark.parametrize("case", queues.CASES)
def test_queues_end(model_dir, case, monkeypatch):
    monkeypatch.setattr("gc.unfreeze", lambda: None)  # the next collection would search all modules and tests
    assert queues.cpu_seconds(case(model_dir, 100)) > 0


def test_a_run_does_not_look_through_what_has_ended(model_dir, monkeypatch):
    looks, read = itertools.count(), Sequence.finished.fget
    monkeypatch.setattr(Sequence, "finished", property(lambda self: (next(looks), read(self))[1]))
    queues.embed_texts(model_dir, 2000)()
    assert next(looks) < 20 * 2000


def test_host_work_is_measured_while_all_streams_decode(model_dir):
    times = queues.host_ms(model_dir, streams=8, prompt=100, steps=20)
    assert 10 <= len(times) <= 20
    assert all(0 < value < math.inf for value in times)


@pytest.mark.parametrize("target", [0.0, math.inf])
def test_a_step_is_measured_by_its_parts(model_dir, monkeypatch, target):
    cases = tuple(host.Case(rows, 160, 40, target) for rows in (4, 8, 8))
    monkeypatch.setattr(host, "CASES", cases)
    monkeypatch.setattr(host, "MAX_GROWTH", target)
    monkeypatch.setattr(host, "PREFILL_SECONDS", target)
    settings = Settings(
        quick=True, rounds=1, folder=None, demo=model_dir, peer_python=None, threads=1, search=False, memory=None
    )
    report = Report()
    host.host(report, settings)
    for row in report.rows:
        parts = [row[f"{part}_ms"] for part in ("schedule", "process", "commit_pack", "snapshots", "outputs")]
        assert min(parts) >= 0  # rounded
        assert row["sum_ms"] > 0
        assert row["sum_ms"] == pytest.approx(sum(parts), rel=0.5)
    assert [check.met for check in report.checks] == [target > 0] * 5
