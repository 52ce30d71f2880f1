"""The gated delta rule: both implementations against the formulas in float64, over slots, parts and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import RecurrentState
from jaxinfer.pallas_kernels.delta_rule import reference, xla

KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM, CONV = 2, 2, 8, 6, 4
HEADS, FEATURES = KEY_HEADS * GROUP, 2 * KEY_DIM + GROUP * VALUE_DIM
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(KEY_HEADS, FEATURES, CONV)).astype(np.float32)


def inputs_of(tokens):
    """What a sequence brings: the convolution's inputs, decays and betas."""
    qkv = RNG.normal(size=(tokens, KEY_HEADS, FEATURES))
    decay, beta = -RNG.gamma(0.5, size=(tokens, HEADS)), RNG.uniform(size=(tokens, HEADS))
    return [x.astype(np.float32) for x in (qkv, decay, beta)]


def by_hand(qkv, decay, beta):
    """Token by token, head by head, in float64: outputs [T, Hv, V], the last state, the last inputs."""
    qkv, weight = qkv.astype(np.float64), WEIGHT.astype(np.float64)
    padded = np.concatenate([np.zeros((CONV - 1, *qkv.shape[1:])), qkv])
    outputs, state = np.zeros((len(qkv), HEADS, VALUE_DIM)), np.zeros((HEADS, KEY_DIM, VALUE_DIM))
    for t in range(len(qkv)):
        x = sum(weight[..., j] * padded[t + j] for j in range(CONV))
        x = x / (1 + np.exp(-x))
        for head in range(HEADS):
            key_head, place = divmod(head, GROUP)
            q, k = x[key_head, :KEY_DIM], x[key_head, KEY_DIM : 2 * KEY_DIM]
            v = x[key_head, 2 * KEY_DIM :].reshape(GROUP, VALUE_DIM)[place]
            q, k = (y / np.sqrt(np.sum(y**2) + 1e-6) for y in (q, k))
            S = np.exp(np.float64(decay[t, head])) * state[head]
            state[head] = S + np.outer(k, beta[t, head] * (v - S.T @ k))
            outputs[t, head] = state[head].T @ q / np.sqrt(KEY_DIM)
    return outputs, state, padded[-(CONV - 1) :]


def empty_states(slots, window=0):
    """States that other sequences have left."""
    shapes = RecurrentState.shapes(
        slots,
        conv=CONV,
        key_heads=KEY_HEADS,
        value_heads=HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        dtype=np.dtype(np.float32),
        window=window,
    )
    return jax.tree.map(lambda x: jnp.full(x.shape, 7, x.dtype), shapes)


@functools.cache
def jitted(implementation):
    return jax.jit(implementation.gated_delta_rule, static_argnames="key_dim")


def run(implementation, rows, states):
    """Run rows of (slot, start, arrays) in one call; returns the outputs of the tokens that are no padding."""
    width = max(len(arrays[0]) for _, _, arrays in rows)
    packed = [np.full((len(rows), width, *x.shape[1:]), np.nan, x.dtype) for x in rows[0][2]]
    positions = np.full((len(rows), width), -1, np.int32)
    for at, (_, start, arrays) in enumerate(rows):
        for target, x in zip(packed, arrays, strict=True):
            target[at, : len(x)] = x
        positions[at, : len(arrays[0])] = start + np.arange(len(arrays[0]))
    slot = np.int32([slot for slot, *_ in rows])
    output, states = jitted(implementation)(*packed, WEIGHT, states, slot, positions, key_dim=KEY_DIM)
    return [np.asarray(x)[: len(arrays[0])] for x, (*_, arrays) in zip(output, rows, strict=True)], states


def part(arrays, first, last=None):
    return [x[first:last] for x in arrays]


def check(found, states, slot, arrays):
    outputs, state, conv = by_hand(*arrays)
    np.testing.assert_allclose(found, outputs, atol=2e-5)
    np.testing.assert_allclose(states.state[slot], state, atol=2e-5)
    np.testing.assert_allclose(states.conv[slot], conv, atol=1e-6)


@pytest.mark.parametrize("implementation", [reference, xla], ids=["reference", "xla"])
def test_sequences_of_all_lengths_in_one_call(implementation):
    sequences = [inputs_of(tokens) for tokens in (1, 63, 64, 65, 127)]
    before = empty_states(7)
    outputs, states = run(implementation, [(slot, 0, x) for slot, x in enumerate(sequences)], before)
    for slot, (found, arrays) in enumerate(zip(outputs, sequences, strict=True)):
        check(found, states, slot, arrays)
    for old, new in zip(before[:2], states[:2], strict=True):
        np.testing.assert_array_equal(old[5:], new[5:])


@pytest.mark.parametrize("implementation", [reference, xla], ids=["reference", "xla"])
def test_parts_of_a_sequence_and_single_tokens(implementation):
    """A sequence in three parts, two of them in one call, and then token by token, while another is in its midst."""
    one, other = inputs_of(75), inputs_of(21)
    rows = [(2, 0, part(one, 0, 20)), (0, 0, part(other, 0, 19)), (2, 20, part(one, 20, 40))]
    (first, begun, second), states = run(implementation, rows, empty_states(4))
    (third,), states = run(implementation, [(2, 40, part(one, 40, 73))], states)
    found, rest = [first, second, third], [begun]
    for t in (73, 74):
        rows = [(3, -1, part(one, 0, 1)), (0, t - 54, part(other, t - 54, t - 53)), (2, t, part(one, t, t + 1))]
        (_, follows, last), states = run(implementation, rows, states)
        found.append(last)
        rest.append(follows)
    check(np.concatenate(found), states, 2, one)
    check(np.concatenate(rest), states, 0, other)
    np.testing.assert_array_equal(states.state[3], 7)
