"""Attention against a float64 loop over queries and heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import attention


def loop_reference(q, k, v, q_positions, lengths, *, scale, causal, window, softcap, alibi):
    """One query and head at a time, over its visible keys."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    keys = np.arange(k.shape[1])
    for b, t, h in np.ndindex(q.shape[:3]):
        position = q_positions[b, t]
        visible = keys < lengths[b]
        if causal:
            visible &= keys <= position
        if window is not None:
            visible &= keys > position - window
        if not visible.any():
            continue
        scores = scale * k[b, visible, h // group] @ q[b, t, h]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if alibi is not None:
            scores = scores + alibi[h] * (keys[visible] - position)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, visible, h // group]
    return out


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
OPTIONS = {
    "plain": {},
    "encoder": {"causal": False},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": SLOPES},
    "all": {"window": 5, "softcap": 1.5, "alibi": SLOPES},
}


def check(*cases):
    """Of options' names, rows, tokens, keys, and key heads; in one program, as compiling takes longest."""
    options = [
        dict.fromkeys(("window", "softcap", "alibi")) | {"causal": True, "scale": 0.4} | OPTIONS[case[0]]
        for case in cases
    ]
    every = []
    for _, batch, tokens, keys, kv_heads in cases:
        rng = np.random.default_rng(0)
        q = rng.normal(size=(batch, tokens, 4, 8))
        k, v = rng.normal(size=(2, batch, keys, kv_heads, 8))
        positions = rng.integers(0, keys - tokens, batch)[:, None] + np.arange(tokens)
        every.append((*(x.astype(np.float32) for x in (q, k, v)), positions, np.full(batch, keys - 1)))
    results = jax.jit(lambda every: [attention(*args, **one) for args, one in zip(every, options, strict=True)])(every)
    for args, one, actual, case in zip(every, options, results, cases, strict=True):
        exact = [x.astype(np.float64) for x in args[:3]]
        expected = loop_reference(*exact, *args[3:], **one)
        np.testing.assert_allclose(actual, expected, atol=1e-5, err_msg=str(case))


def test_groups_against_loops():
    check(*((name, 2, 2, 7, kv_heads) for name in ("plain", "all") for kv_heads in (4, 2, 1)))


@pytest.mark.parametrize(("batch", "tokens", "keys"), [(1, 1, 13), (3, 1, 16), (2, 5, 9)])
def test_options_against_loops(batch, tokens, keys):
    check(*((name, batch, tokens, keys, 2) for name in OPTIONS))


def test_a_query_that_sees_nothing_stays_finite():
    ones = np.ones((1, 1, 1, 4), np.float32)
    out = jax.jit(lambda *args: attention(*args, scale=1.0))(ones, ones, ones, np.array([[-1]]), np.array([0]))
    assert np.isfinite(out).all()


def test_halves_keep_their_dtype():
    x, integers = jax.ShapeDtypeStruct((1, 3, 2, 8), jnp.bfloat16), jax.ShapeDtypeStruct((1, 3), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    out = jax.eval_shape(lambda *args: attention(*args, scale=1.0), x, x, x, integers, lengths)
    assert out.dtype == jnp.bfloat16


def sized(batch, tokens, keys, *, kv_heads=2, seed=0):
    """Queries, keys, values and positions, for `attention` with `key_sizes`."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, tokens, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, keys, kv_heads, 8)).astype(np.float32)
    return q, k, v, np.zeros((batch, tokens), np.int32)


@functools.partial(jax.jit, static_argnames=("softcap",))
def proportional(args, sizes, softcap=None):
    return attention(*args, None, key_sizes=sizes.astype(jnp.float32), scale=0.4, causal=False, softcap=softcap)


@jax.jit
def of_lengths(args, lengths):
    return attention(*args, lengths, scale=0.4, causal=False)


@pytest.mark.parametrize(("kv_heads", "softcap"), [(4, None), (2, 1.5), (1, 1.5)])
def test_sizes_weigh_keys(kv_heads, softcap):
    args = sized(3, 5, 9, kv_heads=kv_heads)
    sizes = np.random.default_rng(1).integers(0, 5, (3, 9)).astype(float)
    q, k, v = (np.asarray(x, np.float64) for x in args[:3])
    k, v = (np.repeat(x, 4 // kv_heads, axis=2) for x in (k, v))
    scores = 0.4 * np.einsum("bthk,bshk->bhts", q, k)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    weights = sizes[:, None, None] * np.exp(scores)
    expected = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(proportional(args, sizes, softcap=softcap), expected, atol=1e-5)


def test_sizes_of_one_change_nothing():
    args = sized(2, 4, 7)
    plain = of_lengths(args, np.array([7, 7]))
    np.testing.assert_allclose(proportional(args, np.ones((2, 7))), plain, rtol=1e-6, atol=1e-7)


def test_keys_of_size_0_are_not_seen():
    args = sized(2, 4, 7)
    lengths = np.array([5, 2])
    sizes = (np.arange(7) < lengths[:, None]).astype(float)
    np.testing.assert_allclose(proportional(args, sizes), of_lengths(args, lengths), rtol=1e-6, atol=1e-7)


def test_a_size_counts_as_so_many_equal_keys():
    q, k, v, positions = sized(1, 3, 4)
    counts = np.array([1, 3, 2, 5])
    repeated = (np.repeat(x, counts, axis=1) for x in (k, v))
    expected = of_lengths((q, *repeated, positions), np.array([11]))
    np.testing.assert_allclose(proportional((q, k, v, positions), counts[None]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_padding_stays_finite(dtype):
    q, k, v, positions = sized(2, 3, 4)
    args = (*(x.astype(dtype) for x in (q, k, v)), positions)
    out = proportional(args, np.array([[0, 0, 0, 0], [0, 2, 0, 1]]))
    assert out.dtype == dtype
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": np.array([4, 4])}, "either lengths or key_sizes"),
        ({"causal": True}, "got causal=True, window=None, alibi=None"),
        ({"window": 3}, "got causal=False, window=3"),
        ({"alibi": SLOPES}, "alibi=given"),
    ],
)
def test_sizes_exclude_positions(changes, message):
    options = {"lengths": None, "key_sizes": np.ones((2, 4)), "causal": False, "scale": 0.4} | changes
    with pytest.raises(ValueError, match=message):
        attention(*sized(2, 3, 4), **options)
