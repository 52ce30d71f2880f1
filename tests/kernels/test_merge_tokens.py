"""Token merging against a reference that sorts and adds token by token, ToMe's invariants, the compiled kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled.target import Target, compile_for
from jaxinfer.pallas_kernels import merge_tokens
from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted
from jaxinfer.pallas_kernels.target import UnsupportedError, targeting
from jaxinfer.pallas_kernels.token_merging.mosaic import merge_tokens as merge_kernels
from tests.kernels.interpreting import without_races


def reference(x, size, metric, r, protected, margin=None):
    """The original algorithms in float64, row by row and token by token; with a margin PiToMe, else ToMe."""
    rows = zip(x.astype(np.float64), size.astype(np.float64), metric.astype(np.float64), strict=True)
    return tuple(np.stack(part) for part in zip(*(merged(*row, r, protected, margin) for row in rows), strict=True))


def merged(tokens, weights, keys, r, protected, margin):
    """One row: which tokens are dropped (padding), and the destination of those that are merged."""
    count = len(tokens)
    r = max(0, min(r, (count - protected) // 2))
    if not r:
        return tokens, weights
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    choose = bipartite if margin is None else functools.partial(by_energy, margin=margin)
    dropped, destinations, order = choose(unit, weights, r, protected)
    assert len(dropped) + len(destinations) == r
    sums, sizes = tokens * weights[:, None], weights.copy()
    for token, into in destinations.items():
        sums[into] += sums[token]
        sizes[into] += sizes[token]
    left = [token for token in order if token not in dropped and token not in destinations]
    return np.stack([sums[i] / sizes[i] if sizes[i] else 0 * sums[i] for i in left]), sizes[left]


def bipartite(unit, weights, r, protected):
    """ToMe, where padding in A is dropped first, and padding in B is a destination only without any other."""
    count = len(unit)
    even, odd = list(range(0, count, 2)), list(range(1, count, 2))
    dropped = [i for i in even if i >= protected and not weights[i]][:r]
    real = [i for i in even if i >= protected and weights[i]]
    into = [j for j in odd if j >= protected and weights[j]]
    if into:
        best = {i: int(np.argmax(unit[into] @ unit[i])) for i in real}
        real.sort(key=lambda i: -unit[i] @ unit[into[best[i]]])
    else:
        into, best = [j for j in odd if j >= protected], dict.fromkeys(real, 0)
    return dropped, {i: into[best[i]] for i in real[: r - len(dropped)]}, [*even, *odd]


def by_energy(unit, weights, r, protected, margin):
    """PiToMe, where each token of padding is dropped in place of a pair."""
    count = len(unit)
    dropped = [i for i in range(protected, count) if not weights[i]][:r]
    real = [i for i in range(protected, count) if weights[i]]

    def f(cosine):
        return cosine if cosine >= margin else np.exp(cosine - margin) - 1

    def energy(i):
        return np.mean([f(unit[i] @ unit[j]) for j in real if j != i] or [0])

    ranked = sorted(real, key=energy, reverse=True)[: 2 * (r - len(dropped))]
    a, b = ranked[::2], ranked[1::2]
    destinations = {i: b[int(np.argmax(unit[b] @ unit[i]))] for i in a}
    return dropped, destinations, [*(i for i in range(count) if i not in b), *b]


def case(batch, count, features, metric_features, *, dtype=np.float32, padding="none", seed=0):
    """Sizes are integers, as in practice; scores differ by more than rounding errors, so that the pairs are unique."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, count, features)).astype(dtype)
    metric = rng.normal(size=(batch, count, metric_features)).astype(dtype)
    size = rng.integers(1, 9, (batch, count)) * ~padded(padding, batch, count, rng)
    return x, size.astype(np.float32), metric


def padded(where, batch, count, rng):
    """Which tokens are padding, bool [B, n]: differently many at the end of each row, or any."""
    match where:
        case "end":
            return np.arange(count) >= rng.integers(0, count + 1, batch)[:, None]
        case "anywhere":
            return rng.random((batch, count)) < rng.random((batch, 1))
        case _:
            return np.full((batch, count), where == "all")


def check(got, args, r, protected, tolerance, margin=None):
    x, size, metric = map(np.asarray, args)
    expected = reference(x, size, metric, r, protected, margin)
    for actual, exact in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=tolerance, atol=tolerance)


compiled = jax.jit(merge_tokens, static_argnums=3, static_argnames=("protected", "protect_isolated"))
SHAPES = {  # few, since compiling takes most of the time: of tokens, merges, and protected tokens
    "shape": st.sampled_from([(2, 3, 0), (7, 1, 1), (7, 9, 2), (16, 0, 1), (16, 3, 5), (16, 9, 0), (16, 9, 1)]),
    "padding": st.sampled_from(["none", "end", "anywhere", "all"]),
    "seed": st.integers(0, 100),
}


@settings(max_examples=40)
@given(**SHAPES)
def test_any_shape(shape, padding, seed):
    count, r, protected = shape
    args = case(3, count, 3, 6, padding=padding, seed=seed)
    check(compiled(*args, r, protected=protected), args, r, protected, 1e-5)


@pytest.mark.slow
@settings(max_examples=20)
@given(margin=st.sampled_from([-1.0, 0.3, 0.9]), **SHAPES)
def test_any_shape_by_energy(shape, padding, seed, margin):
    count, r, protected = shape
    args = case(3, count, 3, 6, padding=padding, seed=seed)
    got = compiled(*args, r, protected=protected, protect_isolated=margin)
    check(got, args, r, protected, 1e-5, margin)


METHODS = [{}, {"protect_isolated": 0.5}]


@pytest.mark.parametrize("method", METHODS)
def test_padding_is_removed_before_any_other_token(method):
    """Rows of 9 tokens and 8 of padding, 4 of it in A."""
    x, size, metric = case(4, 17, 4, 8)
    size[:, 9:] = 0
    y, new_size = jax.device_get(compiled(x, size, metric, 4, **method))
    for row in range(4):
        kept = new_size[row] > 0
        left, given = ({tuple(token) for token in tokens} for tokens in (y[row, kept], x[row, :9]))
        assert left == given
        np.testing.assert_array_equal(y[row, ~kept], 0)


@pytest.mark.parametrize("method", METHODS)
def test_no_result_depends_on_padding(method):
    x, size, metric = case(4, 17, 4, 8, padding="anywhere")
    others = [np.where(size[..., None] > 0, one, 7 - 3 * one) for one in (x, metric)]
    for actual, expected in zip(
        compiled(others[0], size, others[1], 4, **method), compiled(x, size, metric, 4, **method), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("count", "protected"), [(8, 0), (9, 1), (9, 7)])
def test_protected_tokens_stay_whatever_r(count, protected, method):
    """Even where similarities are as low as can be: all tokens but the protected ones are opposite to each other."""
    for padding in ("none", "end", "all"):
        x, size, _ = case(2, count, 4, 4, padding=padding)
        x[:, :protected, 0], size[:, :protected] = 100 + np.arange(protected), 1
        metric = np.ones((2, count, 4), np.float32) * np.where(np.arange(count) % 2, 1, -1)[:, None].astype(np.float32)
        y, new_size = jax.device_get(compiled(x, size, metric, 100, protected=protected, **method))
        assert y.shape[1] == count - (count - protected) // 2
        for row in range(2):
            at = np.array([np.flatnonzero(y[row, :, 0] == 100 + i)[0] for i in range(protected)], int)
            np.testing.assert_array_equal(y[row, at], x[row, :protected])
            np.testing.assert_array_equal(new_size[row, at], 1)


def test_isolated_tokens_are_left_alone():
    """Two clusters of four, and two tokens like no other, which ToMe would merge."""
    rng = np.random.default_rng(0)
    directions = np.eye(4)[[0, 1, 0, 1, 2, 0, 1, 3, 0, 1]]
    metric = (directions + 0.01 * rng.normal(size=(10, 4))).astype(np.float32)[None]
    x = np.arange(20, dtype=np.float32).reshape(1, 10, 2)
    y, size = jax.device_get(compiled(x, None, metric, 4, protected=0, protect_isolated=0.9))
    np.testing.assert_array_equal(y[0, :2], x[0, [4, 7]])
    np.testing.assert_array_equal(size[0, :2], 1)
    assert np.sum(size[0, 2:]) == 8
    y, _ = jax.device_get(compiled(x, None, metric, 5, protected=0))
    assert not (y[0, :, None] == x[0, [4]]).all(-1).any()


def test_no_merging_changes_nothing():
    x, size, metric = case(2, 9, 4, 4)
    for r in (0, -3):
        assert merge_tokens(x, size, metric, r)[0] is x
    y, ones = merge_tokens(x[:, :2], None, metric[:, :2], 5)  # a class token and one other: no pair
    np.testing.assert_array_equal(y, x[:, :2])
    np.testing.assert_array_equal(ones, 1)


def test_invariants_layer_after_layer():
    """Sizes sum to the original token count, the weighted mean is preserved, and the class token does not change."""
    x, _, metric = case(2, 33, 5, 8)
    mean, first = np.mean(x, axis=1), x[:, 0]

    @jax.jit
    def layers(x, metric):
        size, results = None, []
        for _ in range(3):
            x, size = merge_tokens(x, size, metric[:, : x.shape[1]], 12)
            results.append((x, size))
        return results

    for y, size in jax.device_get(layers(x, metric)):
        np.testing.assert_array_equal(np.sum(size, axis=1), 33)
        np.testing.assert_allclose(np.einsum("bn,bnd->bd", size, y) / 33, mean, atol=1e-5)
        np.testing.assert_array_equal(y[:, 0], first)
        np.testing.assert_array_equal(size[:, 0], 1)


def test_token_counts_of_vit_base():
    x, size = jax.ShapeDtypeStruct((1, 197, 8), jnp.float32), None
    counts = [197]
    for _ in range(12):
        x, size = jax.eval_shape(lambda x, size: merge_tokens(x, size, x, 25), x, size)
        counts.append(x.shape[1])
    assert counts == [197, 172, 147, 122, 97, 72, 47, 24, 13, 7, 4, 3, 2]


def test_ties_are_merged_in_order():
    x = np.arange(8, dtype=np.float32).reshape(1, 8, 1)
    y, size = jax.device_get(compiled(x, None, np.ones((1, 8, 4), np.float32), 2))
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
@pytest.mark.parametrize("padding", ["none", "end", "anywhere", "all"])
@pytest.mark.parametrize(("count", "features", "metric", "r", "protected"), KERNEL_CASES)
def test_kernels(count, features, metric, r, protected, padding):
    args = case(2, count, features, metric, dtype=jnp.bfloat16, padding=padding)
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
        merge_kernels(*args, r=3, protected=1, protect_isolated=None)


def test_energies_run_as_plain_xla():
    args, options = shapes(2, 16, 64, 64), {"protect_isolated": 0.5}
    with targeting(Target.load("h200").gpu):
        with pytest.raises(UnsupportedError, match="without protect_isolated"):
            merge_kernels(*args, r=3, protected=1, **options)
        traced = jax.jit(lambda *args: merge_tokens(*args, 4, **options)).trace(*args)
        assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()


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
