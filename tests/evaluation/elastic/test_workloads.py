"""Arrivals have the rate that was asked and bunch as they should; queries survive a file."""

import json

import numpy as np
import pytest

from jaxinfer.evaluation.elastic.workloads import (
    burstiness,
    bursty_arrivals,
    make_queries,
    poisson_arrivals,
    read_trace,
    table_ii,
    wandering_arrivals,
)
from jaxinfer.evaluation.traces import write_trace
from tests.elastic.serving import TASKS


@pytest.mark.parametrize("arrivals", [poisson_arrivals, wandering_arrivals, bursty_arrivals])
def test_traces_have_the_rate_asked_and_are_the_same_again(arrivals):
    times = arrivals(300.0, 60, seed=3)
    assert len(times) / 60 == pytest.approx(300, rel=0.03)
    assert times.min() >= 0
    assert times.max() <= 60
    assert (np.diff(times) >= 0).all()
    np.testing.assert_array_equal(times, arrivals(300.0, 60, seed=3))
    assert len(times) != len(arrivals(300.0, 60, seed=4)) or not np.array_equal(times, arrivals(300.0, 60, seed=4))


def test_burstiness():
    """That of a Poisson process is 1; the traces bunch more, the bursty one most."""
    steady = burstiness(poisson_arrivals(300.0, 600, seed=0))
    assert steady["cv"] == pytest.approx(1, abs=0.03)
    assert steady["dispersion_1s"] == pytest.approx(1, abs=0.2)
    assert abs(steady["lag_1"]) < 0.15
    wandering, bursty = (burstiness(make(300.0, 600, seed=0)) for make in (wandering_arrivals, bursty_arrivals))
    assert 10 < wandering["dispersion_1s"] < bursty["dispersion_1s"]
    assert bursty["lag_1"] > 0.6
    assert bursty["peak_to_mean"] > 3
    assert burstiness(np.zeros(1)) == {"rate": 0.0}


def test_traces_are_written_and_read(tmp_path):
    made = make_queries(poisson_arrivals(20.0, 2, seed=0), table_ii(TASKS), seed=0, scale=2.0)
    assert {each.latency for each in made} == {1.2, 2.0}
    write_trace(tmp_path / "trace.jsonl", made)
    assert read_trace(tmp_path / "trace.jsonl") == made
    (tmp_path / "trace.jsonl").write_text(json.dumps({"id": 0, "task": "a"}) + "\n")
    with pytest.raises(ValueError, match=r"trace.jsonl:1: not a query"):
        read_trace(tmp_path / "trace.jsonl")
