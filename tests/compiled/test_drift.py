"""How serving corrects what is on record: by the newest calls, past noise, as long as they show it."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.compiled import Drift
from jaxinfer.compiled.drift import NEWEST


def test_the_newest_calls_count():
    drift = Drift(least=3, tolerance=1.2)
    assert [drift.note("a", 2.0) for _ in range(4)] == [False, False, True, False]
    assert drift.factors == {"a": 2.0}
    assert sum(drift.note("a", 1.1) for _ in range(NEWEST)) == 1
    assert drift.factors == {}  # as on record, but for noise


def test_calls_that_are_seen_no_more_are_forgotten():
    now = 0.0
    drift = Drift(least=1, tolerance=1.2, forget=60.0, clock=lambda: now)
    drift.note("slow", 9.0)
    now = 61.0
    assert drift.note("other", 1.0)
    assert drift.factors == {}


def test_what_is_forgotten_is_seen_afresh():
    drift = Drift(least=2, tolerance=1.2)
    drift.note("a", 3.0)
    drift.forget("a")
    assert not drift.note("a", 3.0)
    assert drift.note("a", 3.0)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=3 * NEWEST), st.integers(1, NEWEST))
def test_factors_are_within_the_tolerance_of_the_median(ratios, least):
    drift = Drift(least=least, tolerance=1.1)
    for ratio in ratios:
        drift.note("a", ratio)
    factor = drift.factors.get("a", 1.0)
    if len(ratios) < least:
        assert factor == 1.0
    else:
        assert 1 / 1.1001 < statistics.median_low(ratios[-NEWEST:]) / factor < 1.1001
