"""The paper's figures as the planner predicts them: each point, the headlines, and the fits."""

import statistics

import pytest

from benchmarks.deepspeed_figures import headlines, public, ratios
from benchmarks.deepspeed_figures.__main__ import HEADLINE_TOLERANCE, MOST_FITTED, add_checks, point_row
from benchmarks.deepspeed_figures.fits import fit, left_out
from benchmarks.deepspeed_figures.points import TOLERANCES, points
from benchmarks.deepspeed_figures.systems import FILE, OF_DENSE, write
from benchmarks.pages.planner import planner_section
from benchmarks.report import ROOT, Report
from jaxinfer.sharding.planner import Catalogue

SYSTEMS = Catalogue.read().systems
OWN = [(point, TOLERANCES[system]) for system in TOLERANCES for point in points(system)]


def test_all_points_of_the_paper_are_there():
    assert {system: len(points(system)) for system in SYSTEMS} == {
        "deepspeed-fp16": 18,
        "deepspeed-int8": 18,
        "fastertransformer": 18,
        "deepspeed-moe": 8,
        "pytorch-moe": 8,
    }


@pytest.mark.parametrize(("point", "tolerance"), OWN, ids=[f"{point.system}, {point.label}" for point, _ in OWN])
def test_each_point_of_deepspeed_is_predicted(point, tolerance):
    assert abs(point.error(SYSTEMS[point.system])) <= tolerance


def test_baselines_are_predicted_roughly():
    for system in ("fastertransformer", "pytorch-moe"):
        errors = [abs(point.error(SYSTEMS[system])) for point in points(system)]
        assert statistics.mean(errors) < 0.12
        assert max(errors) < 0.2


def test_few_constants_are_fitted():
    for system in SYSTEMS.values():
        assert len(system.fitted) <= MOST_FITTED
        if "flops_share" not in system.fitted:
            assert [getattr(system, name) for name in OF_DENSE] == [
                getattr(SYSTEMS["deepspeed-fp16"], name) for name in OF_DENSE
            ]


@pytest.mark.parametrize("name", [pytest.param("deepspeed-fp16", marks=pytest.mark.slow), "deepspeed-moe"])
def test_constants_are_those_of_the_fit(name):
    """From the same beginning for every system: the data file holds what the points say, and nothing else."""
    fitted = fit(SYSTEMS[name], points(name))
    worst = [max(abs(point.error(system)) for point in points(name)) for system in (fitted, SYSTEMS[name])]
    assert worst[0] == pytest.approx(worst[1], abs=0.003)


@pytest.mark.slow
def test_a_point_left_out_is_further_off():
    few = points("deepspeed-moe")[:4]
    fitted = fit(SYSTEMS["deepspeed-moe"], few)
    assert max(map(abs, left_out(fitted, few))) > max(abs(point.error(fitted)) for point in few)


def test_headlines():
    predicted, measured = headlines.predicted(), headlines.measured()
    assert predicted["zero_share_of_peak"] > measured["zero_share_of_peak"]
    for name in predicted.keys() - {"zero_share_of_peak"}:
        assert predicted[name] == pytest.approx(measured[name], rel=HEADLINE_TOLERANCE), name
    trillion = next(point for point in points("deepspeed-moe") if point.model == "moe-1t")
    size = headlines.step_bytes("moe-1t", trillion.ways)
    assert size == pytest.approx(3.15e12, rel=0.01)
    assert size / (256 * 1.555e12) == pytest.approx(7.9e-3, rel=0.01)  # the floor at peak bandwidth


def test_ratios_of_schedules():
    by_name = {row["name"]: row for row in ratios.rows()}
    schedule = by_name["530B: schedule"]
    assert schedule["predicted"] == pytest.approx(1.77, rel=0.1)  # the closed form of ticks alone
    assert schedule["predicted"] == pytest.approx(schedule["measured"], rel=0.2)


def test_public_points_are_near():
    rows = public.rows()
    errors = {of: [] for of in dict.fromkeys(row["of"] for row in rows)}
    for row in rows:
        errors[row["of"]].append(abs(row["predicted"] / row["measured"] - 1))
    assert statistics.median(errors["TensorRT-LLM"]) < 0.2
    assert max(errors["SGLang"]) < 0.15
    assert all(row["predicted"] < row["measured"] for row in rows if row["of"] == "DeepEP")  # the wire alone


def test_the_file_of_systems_is_what_would_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.deepspeed_figures.systems.FILE", tmp_path / "systems.toml")
    write(list(SYSTEMS.values()))
    assert (tmp_path / "systems.toml").read_text() == FILE.read_text()


def test_the_page_shows_errors_and_misses():
    report = Report()
    for system in SYSTEMS:
        report.rows += [point_row(point, point.error(SYSTEMS[system]), 0.5) for point in points(system)]
    report.rows += public.rows()[:2] + ratios.rows()[:1]
    predicted = headlines.predicted()
    for name, measured in headlines.measured().items():
        report.row(figure="headline", name=name, measured=measured, predicted=predicted[name])
    add_checks(report)
    assert all(check.met for check in report.checks)
    text = "\n".join(planner_section(report.result()))
    assert "| deepspeed-moe | 8 | 5.4% | 9.2% | 50.0% |" in text
    assert "| TensorRT-LLM | llama-3.1-8b, 1 H200, 128/128, tokens/s | 27,911 |" in text
    assert "Fig. 8" in text
    assert (ROOT / "docs/benchmarks/planner.md").exists()
