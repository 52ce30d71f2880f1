"""Usage that is learned from requests. It begins with the configured usage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.experts.scheduling.policy import POLICIES
from jaxinfer.experts.scheduling.usage import DECAY, HALF_LIFE, LearnedUsage
from tests.experts.systems import gpu, request, scheduler, simulate


def add(usage, routes):
    """Count inputs: "ad" goes to a, then to d."""
    for number, route in enumerate(routes):
        for stage, name in enumerate(route):
            usage.add(request(number, name, stage=stage))


def test_it_begins_as_configured():
    assert LearnedUsage({"a": 0.75, "b": 0.25, "d": 0.9}) == pytest.approx({"a": 0.75, "b": 0.25, "d": 0.9})


def test_half_of_it_is_of_the_last_inputs():
    usage = LearnedUsage({"a": 1.0, "b": 0.0, "d": 0.0})
    add(usage, ["bd"] * HALF_LIFE)
    assert usage == pytest.approx({"a": 0.5, "b": 0.5, "d": 0.5}, rel=0.01)


@given(st.lists(st.sampled_from(["a", "b", "ad", "bd"]), max_size=60))
def test_it_is_a_moving_average(routes):
    """Of 1 for inputs that reach an expert and 0 for others."""
    usage, average = LearnedUsage({"a": 0.6, "b": 0.4, "d": 0.1}), {"a": 0.6, "b": 0.4, "d": 0.1}
    add(usage, routes)
    for route in routes:
        average = {name: DECAY * share + (1 - DECAY) * (name in route) for name, share in average.items()}
    assert usage == pytest.approx(average)
    shares = [usage[name] for name in sorted(usage, key=usage.scores.get)]
    assert shares == sorted(shares)


def test_it_has_no_end():
    """Usage that has faded is 0, and a million inputs later new ones count as at the start."""
    usage = LearnedUsage({"a": 1.0, "b": 0.0})
    add(usage, ["b"] * 10**6)
    assert (usage["a"], usage["b"]) == (0.0, pytest.approx(1.0))
    add(usage, ["a"] * HALF_LIFE)
    assert usage == pytest.approx({"a": 0.5, "b": 0.5})


@pytest.mark.parametrize(("policy", "left"), [("best", "a"), ("paper", "c")])
def test_experts_leave_by_their_usage_in_recent_inputs(policy, left):
    """a is used most by the config, c by the inputs; the paper's policy goes by the config."""
    system = scheduler("abcd", gpu(3), policy=policy)
    simulate(system, *"cb" * HALF_LIFE, every=9.0)
    _, done = simulate(system, "d")
    (victim,) = set("abc") - system.manager.pools[0].resident
    assert victim == left
    assert done[0] == ("load", "d", 0, "disk")


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_show_it_in_every_mode(policy):
    system = scheduler("abcd", gpu(3), policy=policy)
    assert system.statistics.usage == pytest.approx(system.graph.usage)
    simulate(system, *"d" * HALF_LIFE, every=9.0)
    assert system.statistics.usage["d"] == pytest.approx(0.55, abs=0.01)
    assert system.graph.usage["d"] == pytest.approx(0.1)


def test_a_request_that_is_refused_does_not_count():
    system = scheduler("a", gpu(1), options={"max_waiting": 0})
    with pytest.raises(Exception, match="the limit is 0"):
        system.submit(request(0, "a"), 0)
    system.submit(request(0, "a", stage=1), 0)
    assert system.statistics.usage["a"] == pytest.approx(1 + (1 - DECAY))
