"""The rules of routers, as eight families of models have them, against loops over tokens, groups and choices."""

import math

import jax
import numpy as np
import pytest

from jaxinfer.pallas_kernels.moe import top_k_gating
from tests.kernels.routing import HARD_LOGITS, check_in_range, logits_of

STATIC = ("k", "capacity", "normalize", "scoring", "groups", "groups_per_token", "group_score", "scale")
gate = jax.jit(top_k_gating, static_argnames=STATIC)

FAMILIES = {
    "mixtral": {"k": 2},
    "qwen2-moe": {"k": 4, "normalize": False},
    "gpt-moe": {"k": 1, "normalize": False},
    "scaled": {"k": 3, "scale": 2.5},
    "deepseek-v2": {"k": 3, "normalize": False, "groups": 4, "groups_per_token": 2, "scale": 16.0},
    "deepseek-v3": {
        "k": 4,
        "scoring": "sigmoid",
        "groups": 4,
        "groups_per_token": 2,
        "group_score": "top_2_sum",
        "scale": 2.5,
    },
    "sigmoid, not normalised": {"k": 2, "scoring": "sigmoid", "normalize": False, "scale": 0.5},
    "sigmoid, best groups": {"k": 3, "scoring": "sigmoid", "groups": 3, "groups_per_token": 1},
}


def choose(logits, bias, *, k, scoring="softmax", groups=1, groups_per_token=1, group_score="max", **weighing):
    """Return the experts and weights of one token, in float64."""
    logits = [float(logit) for logit in logits]
    scores = [math.exp(logit - max(logits)) for logit in logits]
    scores = [score / sum(scores) for score in scores]
    if scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    biased = [score + float(b) for score, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    members = [sorted(biased[group * size : (group + 1) * size], reverse=True) for group in range(groups)]
    group_scores = [sum(best[: 2 if group_score == "top_2_sum" else 1]) for best in members]
    best_groups = sorted(range(groups), key=lambda group: -group_scores[group])[:groups_per_token]
    allowed = [expert for expert in range(len(logits)) if expert // size in best_groups]
    chosen = sorted(allowed, key=lambda expert: -biased[expert])[:k]
    weights = [scores[expert] for expert in chosen]
    total = sum(weights) if weighing.get("normalize", True) else 1
    return chosen, [weight / total * weighing.get("scale", 1) for weight in weights]


@jax.jit
def gate_by_all(logits, bias):
    """By every rule, without the bias and with it."""
    return {
        name: [top_k_gating(logits, selection_bias=one, **rule) for one in (None, bias)]
        for name, rule in FAMILIES.items()
    }


def test_every_rule():
    """Also where all logits are negative, where there are ties, and for fewer tokens than experts have rows."""
    random = np.random.default_rng(0)
    logits = np.float32(np.concatenate([random.normal(size=(10, 12)), random.normal(size=(4, 12)) - 20]))
    logits = np.concatenate([logits, np.float32(random.integers(-1, 2, (6, 12)))])
    bias = np.float32(random.normal(size=12))
    for name, routings in jax.device_get(gate_by_all(logits, bias)).items():
        for routing, added in zip(routings, (np.zeros(12), bias), strict=True):
            for token, row in enumerate(logits):
                experts, weights = choose(row, added, **FAMILIES[name])
                np.testing.assert_array_equal(routing.experts[token], experts, err_msg=name)
                np.testing.assert_allclose(routing.weights[token], weights, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [30.0, -30.0])
def test_a_large_bias_chooses_and_leaves_no_trace_in_the_weights(bias, scoring):
    """(score + 30) - 30 would have lost all but two digits of the score; of one below 1e-6, all."""
    logits = np.asarray(logits_of(5, 8)) - 12
    biases = np.zeros(8, np.float32)
    biases[[2, 5]] = bias
    routing = gate(logits, 2, normalize=False, scoring=scoring, selection_bias=biases)
    assert (np.isin(routing.experts, [2, 5]).all(1) == (bias > 0)).all()
    scores = np.exp(logits, dtype=np.float64)
    scores = scores / (1 + scores) if scoring == "sigmoid" else scores / scores.sum(1, keepdims=True)
    np.testing.assert_allclose(routing.weights, np.take_along_axis(scores, np.asarray(routing.experts), 1), rtol=1e-6)


def test_normalised_sigmoids_of_unlikely_experts_sum_to_one():
    bias = np.arange(8, dtype=np.float32)
    routing = gate(np.full((5, 8), -40, np.float32), 2, scoring="sigmoid", selection_bias=bias)
    np.testing.assert_array_equal(routing.experts, [[7, 6]] * 5)
    np.testing.assert_allclose(routing.weights, 0.5, rtol=1e-2)  # beside 1e-20 they are as small as 4e-18


def test_normalised_softmax_of_unlikely_experts_sums_to_one():
    """Beside the best expert, which the bias forbids, their shares underflow."""
    first = np.arange(8) == 0
    routing = gate(np.tile(np.float32(200 * first), (5, 1)), 2, selection_bias=np.float32(-30 * first))
    np.testing.assert_allclose(routing.weights, 0.5)


@pytest.mark.parametrize("kind", HARD_LOGITS)
def test_any_logits_give_valid_indices_by_every_rule(kind):
    """Saturated scores tie, and a bias may prefer an expert that is not a number, whose weight is then 0."""
    logits, bias = logits_of(20, 12, kind), np.linspace(-30, 30, 12, dtype=np.float32)
    for name, routings in jax.device_get(gate_by_all(logits, bias)).items():
        rule = FAMILIES[name]
        for routing in routings:
            assert all(np.isfinite(field).all() for field in routing), name
            assert (routing.weights >= 0).all(), name
            np.testing.assert_array_equal(np.bincount(np.ravel(routing.experts), minlength=12), routing.sizes)
            size = 12 // rule.get("groups", 1)
            chosen_groups = [len(set(row // size)) for row in routing.experts]
            assert max(chosen_groups) <= rule.get("groups_per_token", 12), name


def test_groups_of_all_experts_are_no_limit():
    logits = logits_of(5, 8)
    plain, grouped = (gate(logits, 3, groups=n, groups_per_token=n) for n in (1, 4))
    jax.tree.map(np.testing.assert_array_equal, plain, grouped)


def test_a_rule_limits_capacity_too():
    logits, bias = logits_of(20, 8, "one"), np.zeros(8, np.float32)
    routing = gate(logits, 2, scoring="sigmoid", selection_bias=bias, capacity=3)
    check_in_range(routing, logits, 2, 3, normalize=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 9}, "1 <= k <= 8 experts, got k=9"),
        ({"k": 2, "scoring": "tanh"}, "softmax or sigmoid, got 'tanh'"),
        ({"k": 2, "group_score": "mean"}, "max or top_2_sum, got 'mean'"),
        ({"k": 2, "groups": 3}, "8 experts do not divide into groups=3"),
        ({"k": 2, "groups": 0}, "groups=0"),
        ({"k": 2, "groups": 4, "groups_per_token": 5}, r"in 1\.\.4 groups, got 5"),
        ({"k": 3, "groups": 4}, "1 groups of 2 experts are fewer than k=3"),
        ({"k": 2, "groups": 8, "groups_per_token": 2, "group_score": "top_2_sum"}, "at least 2 experts, got groups=8"),
        ({"k": 2, "capacity": 0}, "capacity of at least 1, got 0"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        top_k_gating(np.zeros((3, 8)), **options)


@pytest.mark.parametrize("capacity", [None, 2])
def test_padding_has_no_rows_and_no_share_of_the_capacity(capacity):
    logits = np.random.default_rng(3).standard_normal((7, 4)).astype(np.float32)
    valid = np.array([True, False, True, True, False, False, True])
    logits[~valid] = 30 * np.eye(4, dtype=np.float32)[3]  # padding would fill expert 3
    padded = jax.device_get(gate(logits, 2, valid=valid, capacity=capacity))
    alone = jax.device_get(gate(logits[valid], 2, capacity=capacity))
    np.testing.assert_array_equal(padded.sizes, alone.sizes)
    np.testing.assert_array_equal(padded.weights[valid], alone.weights)
    np.testing.assert_array_equal(padded.weights[~valid], 0)
    kept, total = padded.rows < len(padded.tokens), len(padded.tokens)
    np.testing.assert_array_equal(kept[valid], alone.rows < len(alone.tokens))
    assert not kept[~valid].any()
    assert sorted(padded.tokens.tolist())[: kept.sum()] == sorted(np.repeat(np.arange(7), 2)[kept.ravel()])
    assert (padded.tokens == 7).sum() == total - kept.sum()
