"""Token merging against a reference that sorts and adds token by token, ToMe's invariants, the compiled kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled.target import Target, compile_for
from pallas_kernels import merge_tokens
from pallas_kernels.dispatch import UnsupportedError, interpreted, targeting
from pallas_kernels.merge_tokens import _kernels
from tests.kernels.interpreting import without_races


def reference(x, size, metric, r, protected):
    """The original algorithm, row by row: sort, then add token by token (float64)."""
    results = []
    for tokens, weights, keys in zip(x.astype(np.float64), size.astype(np.float64), metric, strict=True):
        count = len(tokens)
        r_here = max(0, min(r, (count - protected) // 2))
        if not r_here:
            results.append((tokens, weights))
            continue
        unit = keys.astype(np.float64) / np.linalg.norm(keys.astype(np.float64), axis=-1, keepdims=True)
        a, b = np.arange(0, count, 2), np.arange(1, count, 2)
        scores = unit[a] @ unit[b].T
        scores[a < protected] = -np.inf
        scores[:, b < protected] = -np.inf
        order = np.argsort(-scores.max(axis=1), kind="stable")
        sums, sizes = tokens * weights[:, None], weights.copy()
        for i in order[:r_here]:
            into = b[scores[i].argmax()]
            sums[into] += sums[a[i]]
            sizes[into] += sizes[a[i]]
        left = [*a[np.sort(order[r_here:])], *b]
        results.append((sums[left] / sizes[left, None], sizes[left]))
    return tuple(np.stack(part) for part in zip(*results, strict=True))


def case(batch, count, features, metric_features, *, dtype=np.float32, seed=0):
    """Sizes are integers, as in practice; scores differ by more than rounding errors, so that the pairs are unique."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(batch, count, features)), dtype)
    metric = jnp.asarray(rng.normal(size=(batch, count, metric_features)), dtype)
    size = jnp.asarray(rng.integers(1, 9, (batch, count)), jnp.float32)
    return x, size, metric


def check(got, args, r, protected, tolerance):
    x, size, metric = map(np.asarray, args)
    expected = reference(x.astype(np.float64), size, metric.astype(np.float64), r, protected)
    for actual, exact in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=tolerance, atol=tolerance)


@settings(max_examples=12, deadline=None)
@given(
    count=st.sampled_from([2, 7, 16]),
    r=st.sampled_from([0, 1, 3, 9]),
    protected=st.sampled_from([0, 1, 2, 5]),
    seed=st.integers(0, 100),
)
def test_any_shape(count, r, protected, seed):
    args = case(2, count, 3, 6, seed=seed)
    got = jax.jit(merge_tokens, static_argnums=3, static_argnames="protected")(*args, r, protected=protected)
    check(got, args, r, protected, 1e-5)


def test_no_merging_changes_nothing():
    x, size, metric = case(2, 9, 4, 4)
    for r in (0, -3):
        assert merge_tokens(x, size, metric, r)[0] is x
    y, ones = merge_tokens(x[:, :2], None, metric[:, :2], 5)  # a class token and one other: no pair
    np.testing.assert_array_equal(y, x[:, :2])
    np.testing.assert_array_equal(ones, 1)


@pytest.mark.parametrize("r", [3, 12])
def test_invariants_layer_after_layer(r):
    """Sizes sum to the original token count, the weighted mean is preserved, and the class token does not change."""
    x, _, metric = case(2, 33, 5, 8)
    mean, first, size = np.mean(x, axis=1), x[:, 0], None
    for _ in range(3):
        x, size = jax.jit(merge_tokens, static_argnums=3)(x, size, metric[:, : x.shape[1]], r)
        np.testing.assert_array_equal(jnp.sum(size, axis=1), 33)
        np.testing.assert_allclose(jnp.einsum("bn,bnd->bd", size, x) / 33, mean, atol=1e-5)
        np.testing.assert_array_equal(x[:, 0], first)
        np.testing.assert_array_equal(size[:, 0], 1)


@pytest.mark.parametrize(
    ("r", "expected"),
    [
        (5, range(197, 136, -5)),
        (16, [197, 181, 165, 149, 133, 117, 101, 85, 69, 53, 37, 21, 11]),
        (20, [197, 177, 157, 137, 117, 97, 77, 57, 37, 19, 10, 6, 4]),
        (25, [197, 172, 147, 122, 97, 72, 47, 24, 13, 7, 4, 3, 2]),
    ],
)
def test_token_counts_of_vit_base(r, expected):
    x, size = jax.ShapeDtypeStruct((1, 197, 8), jnp.float32), None
    found = [197]
    for _ in range(12):
        x, size = jax.eval_shape(lambda x, size: merge_tokens(x, size, x, r), x, size)
        found.append(x.shape[1])
    assert found == list(expected)


def test_ties_are_merged_in_order():
    x = jnp.arange(8.0).reshape(1, 8, 1)
    y, size = merge_tokens(x, None, jnp.ones((1, 8, 4)), 2)
    np.testing.assert_allclose(
        y[0, :, 0], [0, 6, (1 + 2 + 4) / 3, 3, 5, 7], rtol=1e-6
    )  # 2 and 4 into 1, the first of B
    np.testing.assert_array_equal(size[0], [1, 1, 3, 1, 1, 1])


KERNEL_CASES = [
    # count, features, metric, r, protected
    (5, 8, 8, 2, 1),
    (70, 72, 32, 20, 1),  # features beyond a tile; one tile of tokens
    (133, 64, 80, 64, 2),  # two tiles of tokens, two of the metric's features, the maximum r
    (140, 16, 16, 9, 7),  # protected on both sides; even
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("count", "features", "metric", "r", "protected"), KERNEL_CASES)
def test_kernels(count, features, metric, r, protected):
    args = case(2, count, features, metric, dtype=jnp.bfloat16)
    with without_races():
        y, size = merge_tokens(*args, r, protected=protected)
    expected, sizes = merge_tokens(*args, r, protected=protected)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(size, sizes)
    np.testing.assert_allclose(*(np.asarray(part, np.float32) for part in (y, expected)), rtol=2**-7, atol=1e-6)


@pytest.mark.interpreted
def test_kernels_on_ties_and_float16():
    x, size, _ = case(1, 66, 8, 8, dtype=jnp.float16)
    metric = jnp.tile(jnp.eye(8, dtype=jnp.float16), (9, 1))[None, :66]  # every direction several times
    with without_races():
        got = merge_tokens(x, size, metric, 20)
    check(got, (x, size, metric), 20, 1, 2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": np.float32}, "the kernels take bfloat16 or float16, got x in float32"),
        ({"count": 1025}, "at most 1024 tokens, got 1025"),
        ({"features": 12}, "rows of a multiple of 16 bytes, got 12 features of x"),
        ({"metric_features": 20}, "rows of a multiple of 16 bytes, got 20 features of the metric"),
        ({"count": 1024, "metric_features": 128}, "needs 286720 bytes of shared memory and has 232448"),
    ],
)
def test_unsupported(changes, message):
    args = case(**({"batch": 1, "count": 16, "features": 8, "metric_features": 8, "dtype": jnp.bfloat16} | changes))
    with targeting(Target.load("h200").gpu), pytest.raises(UnsupportedError, match=message):
        _kernels(*args, r=3, protected=1)


@pytest.mark.interpreted
def test_unsupported_arguments_run_the_reference():
    args = case(1, 16, 12, 8, dtype=jnp.bfloat16)
    with interpreted():
        check(merge_tokens(*args, 3), args, 3, 1, 1e-2)


def shapes(batch, count, features, metric):
    return (
        jax.ShapeDtypeStruct((batch, count, features), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, count), jnp.float32),
        jax.ShapeDtypeStruct((batch, count, metric), jnp.bfloat16),
    )


MODELS = [(64, 197, 768, 64), (1, 577, 1024, 64), (3, 677, 1280, 80), (2, 11, 192, 32)]  # ViT-B, L@384, H@364, tiny


@pytest.mark.parametrize("model", MODELS)
def test_lowers_for_cuda(model):
    with targeting(Target.load("h200").gpu):
        traced = jax.jit(lambda *args: merge_tokens(*args, 4)).trace(*shapes(*model))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


@pytest.mark.aot
@pytest.mark.parametrize("model", MODELS)
def test_ahead_of_time(model):
    report = compile_for(Target.load("h200"), lambda *args: merge_tokens(*args, 4), shapes(*model), resources=True)
    kernels = {kernel.name: kernel for kernel in report.kernels if kernel.kind == "mosaic"}
    assert kernels.keys() == {"merge_choose", "merge_average"}
    assert kernels["merge_average"].grid == model[0] * model[2] // 64
    for name, registers in (("merge_choose", 168), ("merge_average", 128)):
        assert kernels[name].resources.spill_bytes == 0
        assert kernels[name].resources.registers <= registers
        assert {"UTMALDG", "HMMA"} <= set(kernels[name].resources.features), kernels[name].resources.features
        assert kernels[name].shared_bytes < 227 << 10
