"""The gated delta rule: its implementations against the formulas in float64, over slots, parts and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.numerics import error_of, expected_of
from benchmarks.kernel_cases import StateHeads, prompting, stepping
from jaxinfer.pallas_kernels import RecurrentState, gated_delta_rule
from jaxinfer.pallas_kernels.cpu.library import use_library
from jaxinfer.pallas_kernels.delta_rule import cpu, mosaic, reference, xla
from jaxinfer.pallas_kernels.dispatch import recorded_implementations
from jaxinfer.pallas_kernels.target import UnsupportedError
from tests.kernels.cpu_levels import LEVELS_OF_TESTS, library_of
from tests.kernels.interpreting import without_races

KEY_HEADS, GROUP, KEY_DIM, CONV = 2, 2, 8, 4
VALUE_DIM = 86  # with AVX-512 a block of four vectors, a vector, and a part of one
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
def jitted(function):
    return jax.jit(function, static_argnames="key_dim")


def by_library(level):
    """The kernel in C++ for an instruction set."""
    library = library_of(level)

    def rule(*args, **options):
        with use_library(library):
            return jitted(cpu.gated_delta_rule)(*args, **options)

    return rule


PLAIN = [pytest.param(implementation, id=name) for name, implementation in (("reference", reference), ("xla", xla))]


@pytest.fixture(params=[*PLAIN, *LEVELS_OF_TESTS])
def rule(request):
    if request.param in (reference, xla):
        return jitted(request.param.gated_delta_rule)
    return by_library(request.param)


@pytest.fixture(params=LEVELS_OF_TESTS)
def kernel(request):
    return by_library(request.param)


def run(rule, rows, states):
    """Run rows of (slot, start, arrays) in one call; returns the outputs of the tokens that are no padding."""
    width = max(len(arrays[0]) for _, _, arrays in rows)
    packed = [np.full((len(rows), width, *x.shape[1:]), np.nan, x.dtype) for x in rows[0][2]]
    positions = np.full((len(rows), width), -1, np.int32)
    for at, (_, start, arrays) in enumerate(rows):
        for target, x in zip(packed, arrays, strict=True):
            target[at, : len(x)] = x
        positions[at, : len(arrays[0])] = start + np.arange(len(arrays[0]))
    slot = np.array([slot for slot, *_ in rows], np.int32)
    output, states = rule(*packed, WEIGHT, states, slot, positions, key_dim=KEY_DIM)
    return [np.asarray(x)[: len(arrays[0])] for x, (*_, arrays) in zip(output, rows, strict=True)], states


def part(arrays, first, last=None):
    return [x[first:last] for x in arrays]


def check(found, states, slot, arrays):
    outputs, state, conv = by_hand(*arrays)
    np.testing.assert_allclose(found, outputs, atol=2e-5)
    np.testing.assert_allclose(states.state[slot], state, atol=2e-5)
    np.testing.assert_allclose(states.conv[slot], conv, atol=1e-6)


def test_sequences_of_all_lengths_in_one_call(rule):
    sequences = [inputs_of(tokens) for tokens in (1, 63, 64, 65, 127)]
    before = empty_states(7)
    outputs, states = run(rule, [(slot, 0, x) for slot, x in enumerate(sequences)], before)
    for slot, (found, arrays) in enumerate(zip(outputs, sequences, strict=True)):
        check(found, states, slot, arrays)
    for old, new in zip(before[:2], states[:2], strict=True):
        np.testing.assert_array_equal(old[5:], new[5:])


def test_parts_of_a_sequence_and_single_tokens(rule):
    """A sequence in three parts, two of them in one call, and then token by token, while another is in its midst."""
    one, other = inputs_of(75), inputs_of(21)
    rows = [(2, 0, part(one, 0, 20)), (0, 0, part(other, 0, 19)), (2, 20, part(one, 20, 40))]
    (first, begun, second), states = run(rule, rows, empty_states(4))
    (third,), states = run(rule, [(2, 40, part(one, 40, 73))], states)
    found, rest = [first, second, third], [begun]
    for t in (73, 74):
        rows = [(3, -1, part(one, 0, 1)), (0, t - 54, part(other, t - 54, t - 53)), (2, t, part(one, t, t + 1))]
        (_, follows, last), states = run(rule, rows, states)
        found.append(last)
        rest.append(follows)
    check(np.concatenate(found), states, 2, one)
    check(np.concatenate(rest), states, 0, other)
    np.testing.assert_array_equal(states.state[3], 7)


def test_neither_parts_nor_other_rows_change_a_bit(kernel):
    """A sequence as a whole, in parts of which one call has two, and token by token among others."""
    one, other = inputs_of(75), inputs_of(21)
    (whole,), expected = run(kernel, [(2, 0, one)], empty_states(4))
    rows = [(2, 0, part(one, 0, 33)), (1, 0, other), (2, 33, part(one, 33, 73))]
    (first, _, second), states = run(kernel, rows, empty_states(4))
    found = [first, second]
    for t in (73, 74):
        (_, last), states = run(kernel, [(1, t, part(other, t - 73, t - 72)), (2, t, part(one, t, t + 1))], states)
        found.append(last)
    np.testing.assert_array_equal(np.concatenate(found), whole)
    for x, y in zip(states[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(x[2], y[2])


def test_bfloat16_is_rounded_before_the_convolution_alone(kernel):
    arrays = inputs_of(40)
    arrays[0] = arrays[0].astype(jnp.bfloat16)
    before = empty_states(2)
    before = before._replace(conv=before.conv.astype(jnp.bfloat16))
    (found,), states = run(kernel, [(0, 0, part(arrays, 0, 39))], before)
    (last,), states = run(kernel, [(0, 39, part(arrays, 39))], states)
    assert states.conv.dtype == jnp.bfloat16
    check(np.concatenate([found, last]), states, 0, [x.astype(np.float32) for x in arrays])


def test_tokens_that_do_not_move_a_state_read_what_it_would_be(kernel):
    arrays = inputs_of(26)
    (whole,), _ = run(kernel, [(0, 0, arrays)], empty_states(3))
    (_, _), states = run(kernel, [(0, 0, part(arrays, 0, 20)), (1, 0, part(arrays, 0, 20))], empty_states(3))
    rows = [np.stack([x[20:26]] * 3) for x in arrays]
    positions = np.stack([np.arange(20, 26)] * 2 + [np.full(6, -1)]).astype(np.int32)
    kept = np.array([1, 4, 0], np.int32)
    output, states = kernel(*rows, WEIGHT, states, np.arange(3, dtype=np.int32), positions, kept, key_dim=KEY_DIM)
    for slot in (0, 1):
        np.testing.assert_array_equal(output[slot], whole[20:])
        check(whole[: 20 + kept[slot]], states, slot, part(arrays, 0, 20 + kept[slot]))
    np.testing.assert_array_equal(states.state[2], 7)


@pytest.mark.parametrize("tokens", [1, 70])
def test_a_loop_copies_no_states(tokens, kernel):
    """Layers in a loop, as in a program of several steps."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4096, *x.shape[1:]), x.dtype), empty_states(1))
    args = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in inputs_of(tokens)]

    def loop(qkv, decay, beta, slot, positions, layers):
        def body(i, state):
            total, moved = state[0], []
            for cache in state[1]:
                output, cache = kernel(
                    qkv + total, decay, beta, WEIGHT, cache, slot, positions + i * tokens, key_dim=KEY_DIM
                )
                moved.append(cache)
                total = total + jnp.sum(output)
            return total, moved

        return jax.lax.fori_loop(0, 5, body, (jnp.float32(0), layers))

    indices = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2,), (2, tokens))]
    compiled = jax.jit(loop, donate_argnums=5).lower(*args, *indices, [shapes, shapes]).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert memory.alias_size_in_bytes >= 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    assert memory.temp_size_in_bytes < 4 << 20
    assert not [line for line in text.splitlines() if " copy(" in line and "4096," in line]


def test_other_dtypes_are_left_to_xla():
    states = empty_states(2)
    states = states._replace(conv=states.conv.astype(jnp.float16))
    args = [x[None] for x in inputs_of(1)]
    args[0] = args[0].astype(jnp.float16)
    indices = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    with use_library(library_of(None)), recorded_implementations() as used:
        jax.eval_shape(lambda *x: gated_delta_rule(*x, key_dim=KEY_DIM), *args, WEIGHT, states, *indices)
    assert [kind.name for kind in used["delta_rule_step"]] == ["xla"]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("rows", "heads"), [(3, StateHeads(2, 4, 64, 24)), (1, StateHeads(1, 2, 128, 32)), (2, StateHeads(1, 1, 256, 16))]
)
def test_step_kernel(rows, heads):
    """Rows that begin over NaN, that go on, and of padding, whose states stay."""
    case = stepping(rows, heads, padding=1)
    args = list(case.make(jax.random.key(0)))
    cache, slot = args[4], args[5]
    expected = expected_of(case, tuple(args))
    args[4] = jax.tree.map(lambda x: x.at[slot[0]].set(jnp.nan), cache)
    with without_races():
        assert error_of(case, tuple(args), expected) < case.tolerance


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "message"),
    [(32, 8, "must have 64, 128 or 256 keys, got 32"), (64, 12, "a multiple of 8 columns, got 12")],
)
def test_step_kernel_refuses(key_dim, value_dim, message):
    case = stepping(1, StateHeads(1, 1, key_dim, value_dim))
    with pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(lambda *args: mosaic.delta_rule_step(*args, key_dim=key_dim), *case.args)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [((1, 63, 64, 65, 127, 128), StateHeads(1, 1, 64, 64)), ((70, 20, 3), StateHeads(1, 2, 96, 64))],
)
def test_prompt_kernels(lengths, heads):
    """Rows that begin over NaN, that go on, and one that goes on with the first, whose last chunk is not full."""
    case = prompting(lengths, heads)
    args = list(case.make(jax.random.key(0)))
    expected = expected_of(case, tuple(args))
    args[4] = jax.tree.map(lambda x: x.at[args[5][0]].set(jnp.nan), args[4])
    with without_races(), recorded_implementations() as used:
        assert error_of(case, tuple(args), expected) < case.tolerance
    assert [kind.name for kind in used["gated_delta_rule"]] == ["mosaic"]


@pytest.mark.interpreted
def test_prompt_kernels_agree_with_xla_on_guesses():
    """Of which none, some or all move the state, over keys that are nearly the same and betas up to 2."""
    case = prompting((6, 5, 4, 1), StateHeads(1, 2, 64, 64))
    qkv, decay, beta, *rest, _, positions = case.make(jax.random.key(0))
    qkv = qkv.at[:, 1:].set(qkv[:, :1] + 0.01 * qkv[:, 1:])
    args = [qkv, 0.01 * decay, 2 * beta, *rest, jnp.arange(4), positions.at[3].set(-1), jnp.array([1, 5, 0, 0])]
    expected = jitted(xla.gated_delta_rule)(*args, key_dim=64)
    with without_races():
        found = mosaic.gated_delta_rule(*args, key_dim=64)
    real = np.asarray(args[6]) >= 0
    np.testing.assert_allclose(found[0][real], expected[0][real], atol=2e-5)
    np.testing.assert_allclose(found[1].state, expected[1].state, atol=2e-5)
    np.testing.assert_array_equal(found[1].conv, expected[1].conv)


@pytest.mark.parametrize(
    ("tokens", "key_dim", "value_dim", "message"),
    [
        (2, 256, 64, "at most 128 keys, got 256"),
        (2, 12, 64, "a multiple of 8 keys, got 12"),
        (2, 64, 96, "a multiple of 64 columns, got 96"),
        (65, 64, 64, "at most 64 tokens, got 65"),
    ],
)
def test_prompt_kernels_refuse(tokens, key_dim, value_dim, message):
    case = prompting((tokens,), StateHeads(1, 1, key_dim, value_dim))
    kept = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(lambda *args: mosaic.gated_delta_rule(*args, key_dim=key_dim), *case.args, kept)
