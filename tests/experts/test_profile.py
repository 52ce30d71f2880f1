"""Costs: the line through latencies, the best batch size, and what is refused."""

import numpy as np
import pytest

from jaxinfer.experts.errors import ProfileError
from jaxinfer.experts.scheduling.profile import Profile, choose_max_batch, fit_latency


def test_fits_a_line():
    assert fit_latency({n: 0.02 * n + 0.018 for n in (1, 2, 4, 8)}) == pytest.approx((0.02, 0.018, 1))


def test_fits_the_least_squares():
    noisy = {1: 0.04, 2: 0.055, 4: 0.1, 8: 0.175}
    k, b, r_squared = fit_latency(noisy)
    np.testing.assert_allclose((k, b), np.polyfit(list(noisy), list(noisy.values()), 1))
    assert 0.99 < r_squared < 1


def test_b_is_at_least_0():
    assert fit_latency({1: 0.09, 2: 0.2, 4: 0.41})[1] == 0


@pytest.mark.parametrize(
    ("latency", "problem"),
    [
        ({}, "at least two batch sizes"),
        ({4: 1.0}, "at least two batch sizes"),
        ({1: 1.0, 2: 1.0}, "is no line"),
        ({1: 2.0, 2: 1.0}, "K=-1 s"),
        ({1: 1.0, 2: 9.0, 4: 2.0, 8: 9.0}, "is no line"),
    ],
)
def test_refuses_latencies(latency, problem):
    with pytest.raises(ProfileError, match=problem):
        fit_latency(latency)


def test_max_batch_is_where_each_requests_latency_is_flat():
    assert choose_max_batch({n: 0.02 * n + 0.018 for n in (1, 2, 4, 8, 16)}) == 16  # 0.0225 / 0.0211 > 1.05
    assert choose_max_batch({1: 1.0, 2: 1.4, 4: 2.4, 8: 4.7}) == 4  # 0.6 and 0.5875 a request
    assert choose_max_batch({1: 1.0, 2: 2.0, 4: 4.0}) == 1
    assert choose_max_batch({1: 1.0, 2: 1.4, 4: 9.0}) == 2  # gets slower again
    assert choose_max_batch({3: 1.0}) == 3
    with pytest.raises(ProfileError, match="at least one batch size"):
        choose_max_batch({})


def test_seconds_of_a_batch():
    profile = Profile(k=2, b=1, max_batch=8, load={"disk": 5}, latency={1: 3.5, 4: 9.5})
    assert [profile.seconds(n) for n in (1, 2, 4, 5)] == [3.5, 9.5, 9.5, 11]
    assert profile.load_seconds("host") == 5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"k": 0}, "K must be more than 0"),
        ({"k": float("nan")}, "K must be more than 0"),
        ({"b": -1}, "B must be at least 0"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"load": {"host": 1}}, "load from disk is missing"),
        ({"load": {"disk": -1}}, "must take at least 0 s"),
        ({"load": {"disk": 1, "host": float("inf")}}, "loading from host"),
        ({"activation_bytes": -1}, "activation_bytes must be at least 0"),
    ],
)
def test_refuses(changes, problem):
    with pytest.raises(ProfileError, match=problem):
        Profile(**{"k": 1, "b": 1, "max_batch": 1, "load": {"disk": 1}} | changes)
