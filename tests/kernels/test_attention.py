"""Attention against a float64 loop over queries and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention


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


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_groups_against_loops(name, kv_heads):
    check(name, batch=2, tokens=2, keys=7, kv_heads=kv_heads)


@pytest.mark.parametrize(("batch", "tokens", "keys"), [(1, 1, 13), (3, 1, 16), (2, 5, 9)])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_against_loops(name, batch, tokens, keys):
    check(name, batch=batch, tokens=tokens, keys=keys, kv_heads=2)


def check(name, *, batch, tokens, keys, kv_heads):
    options = {"causal": True, "window": None, "softcap": None, "alibi": None, "scale": 0.4} | OPTIONS[name]
    rng = np.random.default_rng(0)
    q = rng.normal(size=(batch, tokens, 4, 8))
    k, v = rng.normal(size=(2, batch, keys, kv_heads, 8))
    lengths = np.full(batch, keys - 1)
    first = rng.integers(0, keys - tokens, batch)
    q_positions = first[:, None] + np.arange(tokens)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    actual = jax.jit(lambda *args: attention(*args, **options))(*arrays, q_positions, lengths)
    expected = loop_reference(q, k, v, q_positions, lengths, **options)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_query_that_sees_nothing_stays_finite():
    ones = jnp.ones((1, 1, 1, 4))
    out = attention(ones, ones, ones, jnp.array([[-1]]), jnp.array([0]), scale=1.0)
    assert np.isfinite(out).all()


def test_halves_keep_their_dtype():
    x = jnp.ones((1, 3, 2, 8), jnp.bfloat16)
    positions = jnp.arange(3)[None]
    assert attention(x, x, x, positions, jnp.array([3]), scale=1.0).dtype == jnp.bfloat16
