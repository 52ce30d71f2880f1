"""The comparison of serving policies: what it is made of, and all of it once, small, on a profile that is made up."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.otas.fragile import FRAGILE, LOADS, fragile_profile
from benchmarks.otas.infaas import LINKS, as_levels, paper_profile, simulated_gain, vits_profile
from benchmarks.otas.live import with_times_of
from benchmarks.otas.planning import brute_force, draw, earned
from benchmarks.otas.replay import RECORDED, read, replayed
from benchmarks.otas.setting import (
    FAR_DEADLINES,
    FAR_SHARE,
    SWINGS,
    TASKS,
    Cell,
    Setting,
    azure_arrivals,
    best_fixed,
    swinging_arrivals,
)
from benchmarks.otas.tables import live, tables
from benchmarks.otas.virtual import CELLS, mean_interval, virtual
from benchmarks.report import Report
from jaxinfer.elastic.scheduling.planner import plan_exact, plan_paper
from jaxinfer.evaluation.elastic.measurements import PAPER_BATCH_SECONDS, Measurements
from jaxinfer.evaluation.elastic.workloads import table_ii
from tests.elastic.serving import TASKS as PAPERS
from tests.elastic.serving import models, profile


def measured(of, capacity):
    """As if a profile had been measured on 200 images of each task."""
    rename = dict(zip(PAPERS, TASKS, strict=True))
    accuracy = {(rename[task], level): value for (task, level), value in of.accuracy.items()}
    return Measurements(
        profile=dataclasses.replace(of, accuracy=accuracy),
        samples={key: np.array([0.95, 1.0]) * seconds for key, seconds in of.seconds.items()},
        right={key: np.arange(200) < 200 * value for key, value in accuracy.items()},
        capacity=capacity,
        scale=64 / capacity / PAPER_BATCH_SECONDS,
    )


@pytest.fixture(scope="module")
def setting():
    capacity = profile().capacity()
    levels, switched = measured(profile(), capacity), measured(models(), capacity)
    return Setting(levels, switched, load_seconds={0: 0.01, 1: 0.02, 2: 0.05}, tests={})


def test_all_policies_serve_the_same_queries(setting):
    policies = ["elastic", "paper", "paper_profiled", "pets", "slack", "slackfit", "rate", "infaas"]
    assert setting.policies[:8] == policies
    assert setting.policies[8:] == ["level-20", "level-15", "level-10", "level-5", "level+2", "level+4", "level+8"]
    queries = setting.queries(Cell("wandering", 1.1), seed=1, count=2000)
    runs = {name: setting.simulate(queries, name, seed=1) for name in setting.contenders}
    ids = sorted(answer.query.id for answer in runs["elastic"].answers)
    assert 1900 < len(ids) < 2100
    for name, run in runs.items():
        assert sorted(answer.query.id for answer in run.answers) == ids
        assert run.best == runs["elastic"].best, name
    assert runs["elastic"].utility > 1.1 * runs["pets"].utility
    assert set(runs["infaas"].levels) <= {0, 1, 2}
    assert set(runs["infaas, by worth"].levels) <= {0, 1, 2}


def test_rivals_run_with_both_batchings(setting):
    ours = setting.make("elastic").batching
    for name in setting.policies[1:]:
        assert setting.make(f"{name}, by worth").batching == ours
        assert setting.make(name).batching != ours
    assert len(setting.contenders) == 2 * len(setting.policies) - 1


def test_a_result_is_replayed(setting):
    row = json.loads(json.dumps(setting.row()))
    found = replayed({"rows": [{"figure": "planner"}, row]})
    assert found.policies == setting.policies
    assert found.row() == row | {"model_capacity": found.row()["model_capacity"]}
    np.testing.assert_allclose(found.row()["model_capacity"], row["model_capacity"], rtol=1e-3)
    median = np.median(found.levels.samples[0, 64])
    assert median == pytest.approx(64 / found.levels.capacity, rel=1e-3)


def test_the_committed_result_can_be_replayed():
    found = replayed(read(RECORDED))
    assert found.levels.profile.capacity(0) < found.levels.capacity
    queries = found.queries(Cell("wandering", 0.8), seed=0, count=1000)
    assert 0.9 < found.simulate(queries, "elastic", seed=0).normalised <= 1.05


def test_the_best_fixed_level_has_the_batching_asked_for():
    utilities = {"elastic": 0.9, "rate": 0.9, "level-8": 0.5, "pets": 0.4, "level+2, by worth": 0.6}
    utilities |= {"pets, by worth": 0.7, "rate, by worth": 0.9}
    assert best_fixed(utilities) == "level-8"
    assert best_fixed(utilities, ", by worth") == "pets, by worth"


def test_a_run_is_simulated_with_its_own_times(setting):
    cell = Cell("wandering", 0.5)
    usual = setting.levels
    slow = dataclasses.replace(usual, samples={key: 1.2 * seconds for key, seconds in usual.samples.items()})
    queries = setting.queries(cell, seed=0, count=1000)
    served = setting._replace(levels=slow).simulate(queries, "pets", seed=0)
    own = with_times_of(usual, served.answers)
    assert len(own.samples[0, 8]) > 1
    np.testing.assert_allclose(np.unique(own.samples[0, 8].round(9)), slow.samples[0, 8])
    assert own.samples[2, 8] is usual.samples[2, 8]
    assert own.capacity == usual.capacity


@pytest.mark.slow
def test_what_is_checked(setting, tmp_path):
    report = Report()
    virtual(report, setting, seeds=range(2), queries=400)
    names = {check.name for check in report.checks}
    assert names == {
        *("utility_1_1x", "utility_1_3x", "utility_bursty", "gain_vs_pets", "gain_vs_paper_mode", "late_share_virtual"),
        *("gain_vs_infaas_real", "gain_vs_infaas_simulated", "gain_vs_paper_profiled", "type1_share"),
        *("utility_far_deadlines", "gain_vs_best_fixed_swing", "gain_vs_best_fixed_fragile"),
        *("gain_vs_pets_equal_batching", "gain_vs_best_fixed_swing_equal_batching"),
        *(f"gain_vs_{rival}{where}" for rival in ("best_fixed", "slack", "slackfit") for where in ("", "_bursty")),
    }
    values = {check.name: check.value for check in report.checks}
    assert values["late_share_virtual"] == 0  # batches here take no longer than the profile says
    assert 0.5 < values["utility_1_1x"] <= 1.05
    report.rows.append(setting.row())
    pytest.importorskip("benchmarks.otas.figures").draw_all(json.loads(json.dumps(report.result())), tmp_path)
    assert len(list(tmp_path.glob("*.svg"))) == 12
    made = tables(report.rows)
    lines = [len(CELLS), len(CELLS), 2 * len(LOADS), len(LINKS)]
    assert [text.count("\n") - 1 for text in made.values()] == lines
    utility = report.rows[0]["utility"]
    assert all(f"{utility:.3f}" in text.splitlines()[2] for title, text in made.items() if "Simulated" in title)


def test_live_runs_in_a_table():
    cell = Cell("wandering", 0.8)._asdict()
    rows = [
        {**cell, "policy": name, "seed": seed, "utility": 0.5 + seed / 10, "simulated": 0.6}
        for seed in range(3)
        for name in ("elastic", "pets")
    ]
    assert live(rows).splitlines()[-1] == "| wandering 0.8x | 0.600 (0.600) | 0.600 (0.600) |"


def test_some_deadlines_are_far(setting):
    queries = setting.queries(Cell("wandering", 1.1, FAR_DEADLINES), seed=0, count=20_000)
    far = [query for query in queries if query.latency > 10 * setting.levels.scale]
    assert len(far) / len(queries) == pytest.approx(FAR_SHARE, rel=0.5)


@pytest.mark.parametrize("swing", SWINGS.values())
def test_arrivals_swing(swing):
    arrivals = swinging_arrivals(500.0, 4 * swing.seconds, seed=0, swing=swing)
    counts, _ = np.histogram(arrivals, bins=4, range=(0, 4 * swing.seconds))
    loads = np.array([swing.low, swing.high] * 2)
    assert counts / 500 / swing.seconds == pytest.approx(loads / swing.mean, rel=0.1)
    assert (np.diff(arrivals) >= 0).all()


def test_one_task_is_fragile_and_worth_most():
    found = fragile_profile()
    lost = {task: found.accuracy_at(task, 0) - found.accuracy_at(task, -20) for task in found.tasks}
    assert max(lost, key=lost.get) == FRAGILE
    assert lost[FRAGILE] > 0.5
    assert sum(kind.utility for kind in table_ii(found.tasks) if kind.task == FRAGILE) > 1


def test_models_as_levels():
    small, large = (measured(profile(scale), 580) for scale in (0.5, 2.0))
    found = as_levels([small, large])
    assert found.profile.levels == (0, 1)
    assert found.profile.seconds[1, 64] == 4 * found.profile.seconds[0, 64]
    assert found.right["digits", 1] is large.right["digits", 0]


def test_vits_are_as_the_literature_says():
    levels, vits = paper_profile(), vits_profile()
    assert levels.capacity(0) == pytest.approx(580)
    assert vits.capacity(0) / vits.capacity(1) == pytest.approx(953 / 309)
    assert vits.accuracy_at("cifar10", 2) - vits.accuracy_at("cifar10", 0) == pytest.approx(0.8582 - 0.8141)
    slow, fast = (simulated_gain(0.8, LINKS[link], seed=0, count=3000) for link in list(LINKS)[::-2])
    assert slow > fast > 0.8


def test_an_interval():
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5, abs=1e-3))


@pytest.mark.parametrize("name", ["code", "conv"])
def test_azure_arrivals(name):
    first, again, other = (azure_arrivals(name, 50.0, 20.0, seed=seed) for seed in (1, 1, 2))
    assert len(first) == 1000
    assert (first[0], first[-1]) == (0.0, pytest.approx(20.0))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_plans_are_carried_out():
    rng = np.random.default_rng(5)
    for _ in range(20):
        jobs = draw(rng, 4, 3, span=0.4)
        best = brute_force(jobs)
        assert earned(jobs, plan_exact(jobs, 0.0)) == pytest.approx(best)
        assert earned(jobs, plan_paper(jobs, 0.0)) <= best + 1e-9
