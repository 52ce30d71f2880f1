"""The rules of routers, as eight families of models have them, against loops over tokens, groups and choices."""

import functools
import math

import jax
import jax.numpy as jnp
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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", FAMILIES.values(), ids=FAMILIES)
def test_every_rule(rule, biased):
    """Also where all logits are negative, where there are ties, and for fewer tokens than experts."""
    random = np.random.default_rng(0)
    logits = np.float32(np.concatenate([random.normal(size=(7, 12)), random.normal(size=(3, 12)) - 20]))
    logits = np.concatenate([logits, np.float32(random.integers(-1, 2, (4, 12)))])
    bias = jnp.asarray(random.normal(size=12), jnp.float32) if biased else None
    routing = gate(logits, selection_bias=bias, **rule)
    for token, row in enumerate(logits):
        experts, weights = choose(row, np.zeros(12) if bias is None else bias, **rule)
        np.testing.assert_array_equal(routing.experts[token], experts)
        np.testing.assert_allclose(routing.weights[token], weights, rtol=1e-5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [30.0, -30.0])
def test_a_large_bias_chooses_and_leaves_no_trace_in_the_weights(bias, scoring):
    """(score + 30) - 30 would have lost all but two digits of the score; of one below 1e-6, all."""
    logits = logits_of(5, 8) - 12
    biases = jnp.zeros(8).at[jnp.array([2, 5])].set(bias)
    routing = gate(logits, 2, normalize=False, scoring=scoring, selection_bias=biases)
    assert (np.isin(routing.experts, [2, 5]).all(1) == (bias > 0)).all()
    scores = jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits)
    np.testing.assert_allclose(routing.weights, jnp.take_along_axis(scores, routing.experts, 1), rtol=1e-6)


def test_normalised_sigmoids_of_unlikely_experts_sum_to_one():
    logits = jnp.full((3, 6), -40.0)
    routing = gate(logits, 2, scoring="sigmoid", selection_bias=jnp.arange(6.0))
    np.testing.assert_array_equal(routing.experts, [[5, 4]] * 3)
    np.testing.assert_allclose(routing.weights, 0.5, rtol=1e-2)  # beside 1e-20 they are as small as 4e-18


def test_normalised_softmax_of_unlikely_experts_sums_to_one():
    """Beside the best expert, which the bias forbids, their shares underflow."""
    logits = jnp.zeros((2, 6)).at[:, 0].set(200.0)
    routing = gate(logits, 2, selection_bias=jnp.zeros(6).at[0].set(-30.0))
    np.testing.assert_allclose(routing.weights, 0.5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["sigmoid", "deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("kind", HARD_LOGITS)
def test_any_logits_give_valid_indices_by_every_rule(kind, name, biased):
    """Saturated scores tie, and a bias may prefer an expert that is not a number, whose weight is then 0."""
    rule = FAMILIES.get(name, {"k": 3, "scoring": "sigmoid"})
    logits = logits_of(20, 12, kind)
    bias = jnp.linspace(-30.0, 30.0, 12) if biased else None
    routing = gate(logits, selection_bias=bias, **(rule | {"scale": 1.0}))
    indices = {name: getattr(routing, name) for name in ("rows", "tokens", "offsets", "sizes")}
    assert all(np.isfinite(np.asarray(field)).all() for field in routing)
    assert (np.asarray(routing.weights) >= 0).all()
    np.testing.assert_array_equal(np.bincount(np.ravel(routing.experts), minlength=12), indices["sizes"])
    size = 12 // rule.get("groups", 1)
    chosen_groups = [len(set(row // size)) for row in np.asarray(routing.experts)]
    assert max(chosen_groups) <= rule.get("groups_per_token", 12)


def test_groups_of_all_experts_are_no_limit():
    logits = logits_of(9, 8)
    plain, grouped = (gate(logits, 3, groups=n, groups_per_token=n) for n in (1, 4))
    jax.tree.map(np.testing.assert_array_equal, plain, grouped)


def test_a_rule_limits_capacity_too():
    logits = logits_of(20, 8, "one")
    rule = functools.partial(gate, logits, 2, scoring="sigmoid", selection_bias=jnp.zeros(8))
    check_in_range(rule(capacity=3), logits, 2, 3, normalize=True)


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
        top_k_gating(jnp.zeros((3, 8)), **options)


@pytest.mark.parametrize("capacity", [None, 2])
def test_padding_has_no_rows_and_no_share_of_the_capacity(capacity):
    logits = np.random.default_rng(3).standard_normal((7, 4)).astype(np.float32)
    valid = np.array([True, False, True, True, False, False, True])
    logits[~valid] = 30 * np.eye(4, dtype=np.float32)[3]  # padding would fill expert 3
    padded = top_k_gating(jnp.asarray(logits), 2, valid=jnp.asarray(valid), capacity=capacity)
    alone = top_k_gating(jnp.asarray(logits[valid]), 2, capacity=capacity)
    np.testing.assert_array_equal(padded.sizes, alone.sizes)
    np.testing.assert_array_equal(padded.weights[valid], alone.weights)
    np.testing.assert_array_equal(padded.weights[~valid], 0)
    kept, total = np.asarray(padded.rows) < len(padded.tokens), len(padded.tokens)
    np.testing.assert_array_equal(kept[valid], np.asarray(alone.rows) < len(alone.tokens))
    assert not kept[~valid].any()
    assert sorted(np.asarray(padded.tokens).tolist())[: kept.sum()] == sorted(np.repeat(np.arange(7), 2)[kept.ravel()])
    assert (np.asarray(padded.tokens) == 7).sum() == total - kept.sum()
