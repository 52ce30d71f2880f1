"""CoServe's evaluation: its data, and all figures, tables and plots of a very small run."""

import dataclasses

import pytest

from benchmarks.coserve import decisions
from benchmarks.coserve.machines import NUMA, UMA, best_layout, casual, executors, largest_pool, profiles
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


def test_all_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "QUEUED", 40)
    monkeypatch.setattr(decisions, "FURTHER", 20)
    report = Report()
    simulation = Simulation(report, quick=True, plots=tmp_path)
    simulation.tasks = tuple(dataclasses.replace(task, images=150) for task in simulation.tasks)
    simulation.run_all()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ablation.svg", "sweeps.svg", "throughput.svg"]
    assert sum(text.count("\n") > 1 for text in tables(report.rows).values()) == 9
    assert len({check.name for check in report.checks}) == len(report.checks) == 16
