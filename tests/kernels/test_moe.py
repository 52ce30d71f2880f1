"""Mixture of experts: the plain-JAX references against loops and against one-hot matmuls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.pallas_kernels import Weights
from jaxinfer.pallas_kernels.moe import Routing, grouped_matmul, permute, top_k_gating, unpermute
from tests.kernels.routing import HARD_LOGITS, check_in_range, logits_of


def reference(logits, k, capacity, normalize) -> Routing:
    """Token by token, choice by choice, in float64."""
    count, num_experts = logits.shape
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    exps = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    chosen = np.take_along_axis(exps, order, axis=1)
    weights = chosen / (chosen if normalize else exps).sum(axis=1, keepdims=True)
    assigned = [[] for _ in range(num_experts)]  # (token, choice) of each expert's rows
    for token in range(count):
        for choice in range(k):
            assigned[order[token, choice]].append((token, choice))
    kept = [choices[:capacity] for choices in assigned]
    sizes = [len(choices) for choices in kept]
    offsets = np.cumsum([0, *sizes[:-1]]) if capacity is None else np.arange(num_experts) * capacity
    size = count * k if capacity is None else num_experts * capacity
    rows, tokens = np.full((count, k), size), np.full(size, count)
    for offset, choices in zip(offsets, kept, strict=True):
        for row, (token, choice) in enumerate(choices, offset):
            rows[token, choice], tokens[row] = row, token
    return Routing(order, np.where(rows < size, weights, 0), rows, tokens, offsets, np.array(sizes))


def check_routing(routing: Routing, expected: Routing):
    for name, array, exact in zip(Routing._fields, routing, expected, strict=True):
        assert array.dtype == (jnp.float32 if name == "weights" else jnp.int32), name
        np.testing.assert_allclose(array, exact, rtol=1e-5, atol=1e-7, err_msg=name)


def random_logits(tokens, experts, seed, *, ties=False):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, (tokens, experts)) if ties else 2 * rng.normal(size=(tokens, experts))
    return logits.astype(np.float32)


def dense(x, logits, k, normalize, w_in, w_out):
    """Each token through each of its experts (two matrices with relu between them), in float64."""
    routing = reference(logits, k, None, normalize)
    y = np.zeros((len(x), w_out.shape[1]))
    for token in range(len(x)):
        for expert, weight in zip(routing.experts[token], routing.weights[token], strict=True):
            y[token] += weight * (w_out[expert] @ np.maximum(w_in[expert] @ x[token], 0))
    return y


gate = jax.jit(top_k_gating, static_argnames=("k", "capacity", "normalize"))


@functools.partial(jax.jit, static_argnames=("k", "normalize", "capacity"))
def layer(x, logits, w_in, w_out, *, k, normalize=True, capacity=None):
    routing = top_k_gating(logits, k, normalize=normalize, capacity=capacity)
    hidden = jax.nn.relu(grouped_matmul(permute(x, routing), Weights(w_in), routing.offsets, routing.sizes))
    return unpermute(grouped_matmul(hidden, Weights(w_out), routing.offsets, routing.sizes), routing)


# Few shapes, since compiling takes most of the time, but arbitrary contents.
@settings(max_examples=60)
@given(
    case=st.sampled_from(
        [
            ((1, 1, 1), (None, True)),
            ((1, 12, 12), (None, False)),
            ((3, 5, 2), (1, True)),
            ((20, 5, 3), (None, True)),
            ((20, 12, 4), (3, False)),
        ]
    ),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_routing(case, ties, seed):
    (tokens, experts, k), (capacity, normalize) = case
    logits = random_logits(tokens, experts, seed, ties=ties)
    check_routing(gate(logits, k, capacity=capacity, normalize=normalize), reference(logits, k, capacity, normalize))


def test_equal_logits_go_to_the_lower_experts():
    routing = gate(np.zeros((20, 5), np.float32), 3)
    np.testing.assert_array_equal(routing.experts, [[0, 1, 2]] * 20)
    np.testing.assert_array_equal(routing.sizes, [20, 20, 20, 0, 0])


@pytest.mark.parametrize(("capacity", "normalize"), [(None, True), (None, False), (2, True)])
@pytest.mark.parametrize("kind", HARD_LOGITS)
def test_any_logits_give_valid_indices(kind, capacity, normalize):
    logits = logits_of(20, 5, kind)
    routing = gate(logits, 3, capacity=capacity, normalize=normalize)
    check_in_range(routing, logits, 3, capacity, normalize=normalize)


def arguments(dtype=np.float32):
    """Arguments of `layer`: 9 tokens, 6 experts."""
    x, logits = (random_logits(9, 6, seed).astype(dtype) for seed in (0, 1))
    w_in, w_out = np.random.default_rng(2).normal(size=(2, 6, 6, 6)).astype(dtype)
    return x, logits, w_in, w_out


def test_a_token_that_is_not_a_number_stays_alone():
    """NaN in a token and in its logits reaches no other token, through any operation of a layer."""
    x, logits, *weights = arguments()
    expected = np.asarray(layer(x, logits, *weights, k=2))
    x[4] = logits[4] = np.nan
    y = np.asarray(layer(x, logits, *weights, k=2))
    others = np.arange(9) != 4
    assert np.isnan(y[4]).any()
    np.testing.assert_allclose(y[others], expected[others], rtol=1e-5, atol=1e-5)


def test_normalised_weights_are_the_softmax_of_the_chosen_logits():
    """As in Mixtral."""
    logits = random_logits(20, 5, 0)
    best = np.exp(np.sort(logits)[:, :1:-1])
    np.testing.assert_allclose(gate(logits, 3).weights, best / best.sum(1, keepdims=True), rtol=1e-6)


def test_plain_weights_are_probabilities_among_all():
    """As in Qwen-MoE with norm_topk_prob=false; if every expert is chosen, they sum to 1."""
    logits = random_logits(20, 5, 0)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    weights = gate(logits, 3, normalize=False).weights
    np.testing.assert_allclose(weights, np.sort(probabilities)[:, :1:-1], rtol=1e-6)
    all_chosen = gate(random_logits(1, 12, 0), 12, normalize=False).weights
    np.testing.assert_allclose(np.sum(all_chosen), 1, rtol=1e-6)


def test_capacity_drops_the_later_tokens():
    logits = np.float32([[0, 9, 0]] * 5)  # all to expert 1, then 0

    @jax.jit
    def operations(logits):
        routing = top_k_gating(logits, 1, capacity=2)
        rows = jnp.full((6, 4), jnp.nan).at[2:4].set(1.0)
        return routing, permute(jnp.ones((5, 4)), routing), unpermute(rows, routing)

    routing, permuted, unpermuted = jax.device_get(operations(logits))
    np.testing.assert_array_equal(routing.rows[:, 0], [2, 3, 6, 6, 6])
    np.testing.assert_array_equal(routing.weights[:, 0], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(routing.tokens, [5, 5, 0, 1, 5, 5])
    np.testing.assert_array_equal(permuted.sum(axis=1), [0, 0, 4, 4, 0, 0])
    np.testing.assert_array_equal(unpermuted[:, 0], [1, 1, 0, 0, 0])


@pytest.mark.parametrize(
    ("k", "capacity", "message"),
    [(0, None, "1 <= k <= 4 experts, got k=0"), (5, None, "got k=5"), (1, 0, "capacity of at least 1, got 0")],
)
def test_invalid_options_are_rejected(k, capacity, message):
    with pytest.raises(ValueError, match=message):
        top_k_gating(np.zeros((3, 4)), k, capacity=capacity)


@settings(max_examples=25)
@given(
    case=st.sampled_from([((1, 6, 2), False), ((3, 1, 1), True), ((3, 6, 6), True), ((70, 6, 2), True)]),
    bias=st.sampled_from([0, 20]),
    seed=st.integers(0, 1000),
)
def test_a_layer_equals_the_dense_computation(case, bias, seed):
    """With the bias, every token's first choice is expert 0."""
    (tokens, experts, k), normalize = case
    rng = np.random.default_rng(seed)
    x, w_in, w_out = rng.normal(size=(tokens, 6)), rng.normal(size=(experts, 10, 6)), rng.normal(size=(experts, 4, 10))
    logits = random_logits(tokens, experts, seed) + bias * (np.arange(experts) == 0).astype(np.float32)
    y = layer(*(np.float32(a) for a in (x, logits, w_in, w_out)), k=k, normalize=normalize)
    np.testing.assert_allclose(y, dense(x, logits, k, normalize, w_in, w_out), rtol=1e-4, atol=1e-4)


def test_a_layer_with_room_for_all_drops_nothing():
    run = functools.partial(layer, *arguments(), k=2)
    np.testing.assert_allclose(run(capacity=9), run(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_halves_keep_their_dtype(dtype):
    x, logits, w_in, w_out = arguments(dtype)
    y = layer(x, logits, w_in / 3, w_out / 3, k=2)
    assert y.dtype == dtype
    exact = dense(
        *(np.asarray(a, np.float32) for a in (x, logits)), 2, True, np.float64(w_in / 3), np.float64(w_out / 3)
    )
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=0.05, atol=0.05)


def by_one_hot(x, logits, *, k, capacity):
    """Dispatch and combine as matmuls with one-hot masks, as in GShard (arXiv:2006.16668)."""
    routing = top_k_gating(logits, k, capacity=capacity)
    experts = logits.shape[1]
    position = routing.rows - routing.offsets[routing.experts]
    kept = (routing.rows < experts * capacity)[..., None, None]
    mask = kept * jax.nn.one_hot(routing.experts, experts)[..., None] * jax.nn.one_hot(position, capacity)[:, :, None]
    rows = jnp.einsum("nec,nd->ecd", mask.sum(axis=1), x)
    combine = jnp.einsum("nk,nkec->nec", routing.weights, mask)
    return rows.reshape(-1, x.shape[1]), jnp.einsum("nec,ecd->nd", combine, rows)


def by_table(x, logits, *, k, capacity):
    routing = top_k_gating(logits, k, capacity=capacity)
    rows = permute(x, routing)
    return rows, unpermute(rows, routing)


def test_tables_take_a_tenth_of_the_flops_of_one_hot_matmuls():
    """With 128 experts, by XLA's cost analysis."""
    tokens, experts, width, k = 512, 128, 256, 2
    capacity = 2 * k * tokens // experts
    x, logits = random_logits(tokens, width, 0), random_logits(tokens, experts, 1)
    results, flops = [], []
    for path in (by_table, by_one_hot):
        compiled = jax.jit(functools.partial(path, k=k, capacity=capacity)).lower(x, logits).compile()
        results.append(compiled(x, logits))
        flops.append(compiled.cost_analysis()["flops"])
    for table, one_hot in zip(*results, strict=True):
        np.testing.assert_allclose(table, one_hot, rtol=1e-5, atol=1e-5)
    assert flops[0] < flops[1] / 10
