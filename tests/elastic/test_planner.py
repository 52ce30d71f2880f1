"""Planners against trying everything, the examples at which the paper's algorithm fails, and what always holds."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.elastic.scheduling.planner import (
    POINTS,
    Job,
    Option,
    PlanTimeoutError,
    plan_exact,
    plan_paper,
)


def job(deadline, *options):
    """With levels 1, 2, ... of (seconds, utility)."""
    return Job(deadline, tuple(Option(level, *option) for level, option in enumerate(options, 1)))


def run(jobs, levels, start, order=None):
    """Utility and end of a plan, carried out; None if a job ends too late."""
    utility, clock = 0.0, start
    for index in order or sorted(range(len(jobs)), key=lambda index: jobs[index].deadline):
        if levels[index] is None:
            continue
        option = next(option for option in jobs[index].options if option.level == levels[index])
        clock += option.seconds
        if clock >= jobs[index].deadline:
            return None
        utility += option.utility
    return utility, clock


def brute_force(jobs, start, *, all_orders=False):
    """The most that any choice of levels earns."""
    choices = [(None, *(option.level for option in each.options)) for each in jobs]
    orders = itertools.permutations(range(len(jobs))) if all_orders else [None]
    found = (run(jobs, levels, start, order) for order in orders for levels in itertools.product(*choices))
    return max(result[0] for result in found if result)


def draw(rng, jobs, levels, span=0.4):
    """Jobs as batches of queries give: more tokens, more seconds, mostly more utility."""
    made = []
    for _ in range(jobs):
        seconds = np.sort(rng.uniform(0.01, 0.12, levels))
        utilities = rng.uniform(0.2, 1.0) * np.clip(
            np.sort(rng.uniform(0.4, 1, levels)) + rng.normal(0, 0.05, levels), 0, 1
        )
        made.append(job(float(rng.uniform(0.02, span)), *zip(seconds.tolist(), utilities.tolist(), strict=True)))
    return made


def test_equal_to_trying_everything_on_1000_instances():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        jobs, start = draw(rng, int(rng.integers(1, 6)), int(rng.integers(1, 4))), float(rng.uniform(0, 0.05))
        plan, best = plan_exact(jobs, start), brute_force(jobs, start)
        assert plan.utility == pytest.approx(best, abs=1e-12)
        assert run(jobs, plan.levels, start) == pytest.approx((plan.utility, plan.end))
        assert plan.utility >= (run(jobs, plan_paper(jobs, start).levels, start) or (0, 0))[0] - 1e-12


def test_the_order_of_deadlines_is_the_best_one():
    rng = np.random.default_rng(1)
    for _ in range(60):
        jobs = draw(rng, int(rng.integers(2, 5)), 2)
        assert plan_exact(jobs, 0.0).utility == pytest.approx(brute_force(jobs, 0.0, all_orders=True))


def test_where_the_papers_algorithm_loses_without_bound():
    """It forgets a partial plan that earns less and ends earlier."""
    jobs = [job(5, (1, 1.0), (2, 1.1)), job(5.2, (1, 1)), job(5.5, (4, 1000.0))]
    assert plan_paper(jobs, 0.0).utility == pytest.approx(2.1)
    assert plan_exact(jobs, 0.0).utility == pytest.approx(1001.0)


def test_where_the_papers_algorithm_runs_what_cannot_end_in_time():
    jobs = [job(1, (5, 1)), job(2, (5, 1))]
    assert plan_paper(jobs, 0.0).levels == [1, None]
    assert plan_exact(jobs, 0.0) == ([None, None], 0.0, 0.0)


def test_the_paper_is_exact_for_two_jobs_that_can_run():
    rng = np.random.default_rng(2)
    for _ in range(200):
        jobs = [each._replace(deadline=each.deadline + 1) for each in draw(rng, 2, 4)]
        assert plan_paper(jobs, 0.0).utility == pytest.approx(plan_exact(jobs, 0.0).utility)


@pytest.mark.parametrize("plan", [plan_exact, plan_paper])
def test_edges(plan):
    assert plan([], 3.0) == ([], 0.0, 3.0)
    assert plan([job(1.0)], 0.0).levels == [None]
    assert plan([job(1.0, (1.0, 5.0))], 0.0).levels in ([None], [1])  # the paper's rows begin with level 1
    assert plan([job(1.0, (0.5, 0.0))], 0.0).utility == 0
    assert plan([job(1.0, (0.2, 1.0), (0.1, 1.0))], 0.0)[1:] in ((1.0, 0.1), (1.0, 0.2))
    for wrong in (job(np.nan, (1, 1)), job(1, (-1, 1)), job(1, (1, np.inf))):
        with pytest.raises(ValueError, match="a plan needs times and utilities that are finite"):
            plan([wrong], 0.0)


def test_the_deadline_is_strict_and_ties_end_early():
    assert plan_exact([job(1.0, (1.0, 5.0))], 0.0).levels == [None]
    assert plan_exact([job(1.1, (1.0, 5.0))], 0.0).levels == [1]
    assert plan_exact([job(1.0, (0.2, 1.0), (0.1, 1.0))], 0.0) == ([2], 1.0, 0.1)
    assert plan_exact([job(1.0, (0.2, 0.0))], 0.0).levels == [None]  # it would cost time and earn nothing


jobs_strategy = st.lists(
    st.builds(
        Job,
        deadline=st.floats(0, 2),
        options=st.lists(
            st.builds(Option, level=st.integers(-9, 9), seconds=st.floats(0, 1), utility=st.floats(0, 5)),
            max_size=4,
            unique_by=lambda option: option.level,
        ).map(tuple),
    ),
    max_size=6,
)


@given(jobs=jobs_strategy, start=st.floats(0, 1), delay=st.floats(0, 1))
def test_what_always_holds(jobs, start, delay):
    plan = plan_exact(jobs, start)
    assert run(jobs, plan.levels, start) == pytest.approx((plan.utility, plan.end))
    assert plan_exact(jobs, start + delay).utility <= plan.utility + 1e-9  # a later start is never better
    fewer = [each._replace(options=each.options[:-1]) for each in jobs]
    assert plan_exact(fewer, start).utility <= plan.utility + 1e-9  # another level never hurts
    rounded = plan_exact(jobs, start, points=3)
    assert rounded.utility <= plan.utility + 1e-9
    assert run(jobs, rounded.levels, start) is not None


def test_planning_stops_at_its_time_limit():
    jobs, seconds = [job(1.0, (0.1, 1.0))] * 5, itertools.count()
    assert plan_exact(jobs, 0.0, time_limit=5.0, clock=lambda: next(seconds)).utility == 5
    with pytest.raises(PlanTimeoutError, match="planning 5 batches took more than 3 s"):
        plan_exact(jobs, 0.0, time_limit=3.0, clock=lambda: next(seconds))


def test_rounding_loses_little():
    """Also where one job has all the time in the world: that is no reason to plan the others coarsely."""
    rng = np.random.default_rng(3)
    for late in ([], [job(3600.0, (0.05, 0.4), (0.1, 0.5))]):
        shares = []
        for _ in range(30):
            jobs = [*draw(rng, 16, 8, span=1.0), *late]
            shares.append(plan_exact(jobs, 0.0, points=POINTS).utility / plan_exact(jobs, 0.0).utility)
        assert min(shares) > 0.99
        assert np.mean(shares) > 0.999


def test_a_front_keeps_few_points_and_among_them_that_nothing_runs():
    jobs = [*draw(np.random.default_rng(4), 30, 8, span=2.0), job(2.001, (2.0, 1e6))]
    assert plan_exact(jobs, 0.0, points=5).utility >= 1e6
