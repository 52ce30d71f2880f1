"""CoServe's evaluation: its data, and all figures, tables and plots of a very small run."""

import dataclasses
import itertools
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.coserve import bursts, decisions, drift, real
from benchmarks.coserve.boards import inputs_of
from benchmarks.coserve.machines import NUMA, UMA, best_layout, casual, executors, largest_pool, profiles
from benchmarks.coserve.real import LOAD_BOUND, Runs
from benchmarks.coserve.run_system import Disk
from benchmarks.coserve.simulated import Simulation
from benchmarks.coserve.tables import tables
from benchmarks.coserve.workload import INTERVAL, TASKS, make_task
from benchmarks.report import Report


def test_layouts_fit_their_machines():
    for machine in (NUMA, UMA):
        for layout in (casual(machine), *(best_layout(machine, task.board, task.gpus) for task in TASKS)):
            assert layout.experts <= largest_pool(machine, layout.gpus)
            configs = executors(machine, layout)
            assert len(configs) == layout.gpus + 1
            for config in configs:
                costs = profiles(machine, layout.gpus)["resnet101", config.processor]
                assert config.activation_bytes >= costs.activation_bytes


def test_a_load_is_most_of_a_requests_time():
    """The paper's section 2: more than 90% from an SSD, on both machines."""
    for machine in (NUMA, UMA):
        costs = profiles(machine, 1)["resnet101", "gpu"]
        assert costs.load["disk"] / (costs.load["disk"] + costs.seconds(1)) > 0.9


def test_tasks():
    graph, trace = make_task(TASKS[1], seed=0)
    assert len(trace) == 3500
    assert len(graph.experts) == 108
    assert trace[1].arrival - trace[0].arrival == INTERVAL
    assert make_task(TASKS[1], seed=0)[1] == trace != make_task(TASKS[1], seed=1)[1]
    again = make_task(TASKS[1], seed=0, repeats=0.4)[1]
    assert repeated(trace) == pytest.approx(0.23, abs=0.04)
    assert repeated(again) == pytest.approx(0.4 + 0.6 * 0.19, abs=0.04)


def repeated(trace):
    """Part of the images whose type one of the last 20 had."""
    types = [item.experts[0] for item in trace]
    return sum(name in types[max(place - 20, 0) : place] for place, name in enumerate(types)) / len(types)


@pytest.mark.slow
def test_all_figures(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks.coserve.plots import draw_all

    monkeypatch.setattr(decisions, "QUEUED", 40)
    monkeypatch.setattr(decisions, "FURTHER", 20)
    report = Report()
    simulation = Simulation(report, quick=True)
    simulation.tasks = tuple(dataclasses.replace(task, images=150) for task in simulation.tasks)
    simulation.run_all()
    names = {check.name for check in report.checks}
    assert len(names) == len(report.checks) == 22
    assert {"uma_switch_cut", "uma_worst_speedup", "switches_saved_vs_casual", "paper_vs_grouping_baseline"} <= names
    add_real(report)
    drift.measure(report, quick=True)
    monkeypatch.setattr(bursts, "BURSTS", bursts.BURSTS[:1])
    bursts.measure(report, quick=True)
    draw_all(report.result(), tmp_path)
    plots = ["ablation.svg", "measured.svg", "rates.svg", "sweeps.svg", "throughput.svg"]
    assert sorted(file.name for file in tmp_path.iterdir()) == plots
    drawn = tables(report.rows)
    assert all(text.count("\n") > 1 for text in drawn.values())
    assert "| 224 |" in drawn["Real systems on this machine"]
    assert "Parallel, grouping" in drawn["Real systems on this machine"]


def given(mode, setting=LOAD_BOUND, *, wrong=False):
    """What a run gives, as if it had been one; `wrong`: one whose actions were not done."""
    profile = {"k": 0.01, "b": 0.01, "max_batch": 8, "load": {"disk": 0.2, "host": 0.02}, "evict": 0.02}
    found = {
        "seconds": 10.0,
        "throughput": 60.0 if mode == "best" else 20.0,
        "loads": {"disk": 40, "host": 9},
        "read": 0 if wrong else 40,
        "management_share": 1e-3,
        "p50": 1.0,
        "p99": 1.0 if mode == "best" else 3.0,
        "initially": [],
        "resident": 2 << 30,
        "routed": 0 if wrong else 200,
        "stages": 200,
    }
    predicted = {"throughput": 22.0, "loads": {"disk": 40, "host": 9}, "p99": 2.1}
    found["predicted"] = predicted | {"profiles": {"classifier on cpu": profile}}
    return found | {"replayed": dict(found), "curve": [[1, 0.1, 0.2], [10, 0.3, 0.9]], "highest": 10.0}


@pytest.mark.slow
def test_drift(monkeypatch):
    """Popularity stays or changes, and usage that is not learned fails the check of changing popularity."""
    monkeypatch.setattr(drift, "SEEDS", range(2))
    fixed, drifting = (drift.make_trace(0, drifts=drifts) for drifts in (False, True))
    assert len(fixed) == len(drifting) == drift.INPUTS
    assert fixed[: drift.PHASE] == drifting[: drift.PHASE]
    assert most_common(fixed[-drift.PHASE :]) == most_common(fixed) != most_common(drifting[-drift.PHASE :])
    assert fixed[-1].arrival == pytest.approx(drift.INPUTS / drift.RATE, rel=0.1)
    for changes, verdicts in (({}, (True, True)), ({"learned": drift.COMPARED["as configured"]}, (True, False))):
        monkeypatch.setattr(drift, "COMPARED", drift.COMPARED | changes)
        report = Report()
        drift.measure(report)
        assert tuple(check.met for check in report.checks) == verdicts
        (text,) = [text for title, text in tables(report.rows).items() if title.startswith("Loads from disk")]
        assert "learned usage (`best`)" in text


def test_bursts(monkeypatch):
    """Ours does as well as with LRU; a policy that does not group fails the check."""
    monkeypatch.setattr(bursts, "BURSTS", bursts.BURSTS[:1])
    for changes, met in (({}, True), ({"best": bursts.COMPARED["samba"]}, False)):
        monkeypatch.setattr(bursts, "COMPARED", bursts.COMPARED | changes)
        report = Report()
        bursts.measure(report, quick=True)
        assert [(check.name, check.met) for check in report.checks] == [("best_vs_lru", met)]
    (text,) = [text for title, text in tables(report.rows).items() if title.startswith("Inputs per second of a burst")]
    assert "32 pixels, slow disk" in text


def most_common(trace):
    return Counter(item.experts[0] for item in trace).most_common(1)[0][0]


def add_real(report, **options):
    """The rows and checks of the real part."""

    class Known(Runs):
        def _run(self, setting, asked):
            return given(asked["mode"], setting, **options)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "make_experts", lambda folder, pixels: None)
        patch.setattr(real, "Runs", Known)
        real.measure(report, Path(folder), quick=True, rounds=2, ratios=[20.0])
        real.measure_latency(report, Path(folder), quick=True, rounds=2)


def test_what_is_not_done_is_seen():
    """A loader that loads nothing, and programs that do not run, fail the checks that say it was all done."""
    for wrong in (False, True):
        report = Report()
        add_real(report, wrong=wrong)
        checks = {check.name: check for check in report.checks}
        for name in ("virtual_loads_exact", "reads_are_loads", "replayed_reads_same"):
            assert checks[name].met != wrong
        assert checks["grouping_baseline_gain"].value == checks["p99_vs_grouping_224"].value == 3.0
        assert checks["simulator_error_max"].value == pytest.approx(1 - 22 / 60, abs=1e-3)
        assert checks["simulator_error"].value == pytest.approx(0.1)


def test_inputs_come_as_they_are_asked_for():
    burst, poisson = inputs_of(2000, 1), inputs_of(2000, 1, rate=50.0)
    assert [item.experts for item in burst] == [item.experts for item in inputs_of(2000, 1)]
    assert burst[0].arrival == 0
    assert poisson[-1].arrival == pytest.approx(40.0, rel=0.1)
    pauses = [after.arrival - before.arrival for before, after in itertools.pairwise(poisson)]
    assert statistics.stdev(pauses) == pytest.approx(1 / 50, rel=0.1)


def test_a_disk_counts_experts(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    disk = Disk(None)
    with open(tmp_path / "file", "rb") as file:
        for offset in (0, 50, 0):
            assert disk(file.fileno(), [bytearray(10)], offset) == 10
    assert disk.experts == 2
