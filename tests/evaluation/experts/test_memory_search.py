"""How much memory is for experts: the paper's windows, and what cannot be."""

import itertools

import numpy as np
import pytest

from jaxinfer.evaluation.experts.memory_search import decay_windows, search_memory
from jaxinfer.experts.errors import ConfigError

UNIFORM = [0.01] * 100


def paper_shape(experts):
    """Throughput that grows with experts until there is too little memory for batches (the paper's Figure 11)."""
    return 20 + 0.2 * experts if experts < 30 else 26 - 0.1 * (experts - 30)


def test_windows_are_the_papers():
    windows = list(itertools.islice(decay_windows(15), 5))
    np.testing.assert_allclose([lower for lower, _ in windows], [0, 15, 27.75, 38.59, 47.80], atol=0.005)
    np.testing.assert_allclose(windows[-1][1], 55.63, atol=0.005)


@pytest.mark.parametrize("w0", [1, 15, 50, 99])
def test_windows_are_100_percent_together(w0):
    windows = list(itertools.islice(decay_windows(w0), 3000))
    np.testing.assert_allclose(sum(upper - lower for lower, upper in windows), 100)
    assert all(window[1] == after[0] for window, after in itertools.pairwise(windows))


def test_ends_in_the_papers_window():
    found = search_memory(UNIFORM, paper_shape, choose="argmax")
    assert [window.experts for window in found.windows] == [(1, 15), (15, 28), (28, 39)]
    slope = (paper_shape(28) - paper_shape(15)) / 1
    assert found.line == pytest.approx((slope, paper_shape(15) - slope))
    predicted = 3 * slope + paper_shape(15) - slope
    assert found.error == pytest.approx((predicted - paper_shape(39)) / predicted)
    assert found.experts == 28


def test_choices():
    assert search_memory(UNIFORM, paper_shape, choose="argmax").experts == 28  # 25.6 there, 25.1 with 39
    chosen = {search_memory(UNIFORM, paper_shape, seed=seed).experts for seed in range(200)}
    assert chosen == set(range(28, 40))
    assert len({search_memory(UNIFORM, paper_shape, seed=3).experts for _ in range(5)}) == 1


def test_usage_is_sorted_and_taken_as_parts():
    """The first window ends where the most used experts have 15% of all usage together."""
    usage = [1.0] * 80 + [20.0]
    found = search_memory(usage, lambda experts: 1 + experts)
    assert found.windows[0].experts == (1, 1)
    assert found.windows[1].experts == (1, 1 + np.ceil(100 * 0.2775 - 20))


def test_axis_of_numbers_of_experts():
    skewed = [0.5, *[0.5 / 99] * 99]
    assert search_memory(skewed, paper_shape, axis="count").windows[0].experts == (1, 15)
    assert search_memory(skewed, paper_shape).windows[0].experts == (1, 1)


def test_without_a_fall_the_last_window_has_the_choice():
    found = search_memory([0.1] * 10, lambda experts: 10.0, choose="argmax")
    assert found.windows[-1].experts[1] == found.experts == 10


def test_no_more_than_the_limit_is_measured():
    seen = []
    found = search_memory(UNIFORM, lambda experts: seen.append(experts) or 10.0 + experts, limit=20)
    assert seen == [15, 20]
    assert 15 <= found.experts <= 20
    assert found.line is None


def test_measures_no_number_twice():
    seen = []
    search_memory([0.6, 0.3, 0.1], lambda experts: seen.append(experts) or 1.0)
    assert seen == [1, 2, 3]


def test_one_expert_and_unused_ones():
    assert search_memory([1.0], lambda experts: 1.0).experts == 1
    assert search_memory([1.0, 0.0, 0.0], lambda experts: 1.0).experts == 1


@pytest.mark.parametrize(
    ("arguments", "changes", "problem"),
    [
        ((UNIFORM, paper_shape), {"w0": 0}, "w0 must be in"),
        ((UNIFORM, paper_shape), {"w0": 100}, "w0 must be in"),
        ((UNIFORM, paper_shape), {"margin": 0}, "margin must be more than 0"),
        ((UNIFORM, paper_shape), {"limit": 0}, "limit must be at least 1"),
        ((UNIFORM, lambda experts: 0.0), {}, "is the sample of requests empty"),
        ((UNIFORM, lambda experts: float("nan")), {}, "must be more than 0, got nan"),
        (([], paper_shape), {}, "no expert to search over"),
        (([0.0], paper_shape), {}, "more than 0 for one"),
        (([float("nan"), 1], paper_shape), {}, "at least 0 for all experts"),
        (([-1.0, 1], paper_shape), {}, "at least 0 for all experts"),
    ],
)
def test_refuses(arguments, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        search_memory(*arguments, **changes)
