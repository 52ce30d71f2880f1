"""Policies by name."""

import pytest

from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.scheduling.policy import POLICIES, Policy, policy_of


def test_by_name_with_changes():
    assert policy_of("paper") == Policy() == POLICIES["paper"]
    assert policy_of("paper", prefetch=3, evict="lru") == Policy(prefetch=3, evict="lru")


@pytest.mark.parametrize(
    ("mode", "changes", "problem"),
    [
        ("fastest", {}, "mode='fastest' is not known; known: samba, fifo"),
        ("paper", {"prefetsch": 1}, "no prefetsch; known: arrange, assign"),
        ("paper", {"prefetch": -1}, "prefetch must be an integer in"),
        ("paper", {"evict": "random"}, "Policy.evict must be 'two_stage' or .* or 'fifo', got 'random'"),
        ("paper", {"max_batch": 0}, "max_batch must be an integer >= 1"),
        ("paper", {"max_age": 0.0}, "max_age must be a finite number > 0"),
        ("paper", {"max_age": float("nan")}, "max_age must be a finite number > 0"),
    ],
)
def test_refuses(mode, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        policy_of(mode, **changes)
