"""Experts' MLPs in every format, and their implementations, against loops in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.moe import expert_mlp, grouped_matmul, in_place, reference, top_k_gating
from jaxinfer.pallas_kernels.weights import GROUP, Weights, dequantize, quantize, quantize_rows
from tests.kernels.routing import logits_of

FORMATS = ["float32", "bfloat16", "int8", "fp8", "int4"]


# One program each, not one for each operation.
quantized = jax.jit(quantize, static_argnums=1)
gating = jax.jit(top_k_gating, static_argnums=1, static_argnames="capacity")
floats = jax.jit(dequantize, static_argnums=1)


def stored(matrices, fmt) -> Weights:
    return quantized(matrices, fmt) if fmt in ("int8", "fp8", "int4") else Weights(matrices.astype(fmt))


def normal(seed, *shape, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def experts_of(count, inputs, hidden, fmt, gated=True):
    """(gate_up, down, gate_up_bias, down_bias)."""
    outputs = 2 * hidden if gated else hidden
    gate_up = stored(normal(0, count, outputs, inputs, scale=inputs**-0.5), fmt)
    down = stored(normal(1, count, inputs, hidden, scale=hidden**-0.5), fmt)
    return gate_up, down, normal(2, count, outputs), normal(3, count, inputs)


def rounded(row, weights):
    """A row as a product with these weights has it."""
    if weights.weight.dtype != jnp.int8:
        return row
    q, scale = quantize_rows(jnp.asarray(row, jnp.float32)[None])
    return (np.asarray(q, np.float64) * np.asarray(scale, np.float64))[0]


def loop(x, routing, experts, *, gated, biased):
    """Token by token and choice by choice, in float64."""
    gate_up, down, gate_up_bias, down_bias = experts
    first, second = (np.asarray(floats(weights, jnp.float32), np.float64) for weights in (gate_up, down))
    y = np.zeros((len(x), second.shape[1]))
    for token, choices in enumerate(np.asarray(routing.experts)):
        for expert, weight in zip(choices, np.asarray(routing.weights, np.float64)[token], strict=True):
            out = first[expert] @ rounded(np.asarray(x, np.float64)[token], gate_up)
            out = out + np.asarray(gate_up_bias)[expert] * biased
            gate = out[::2] if gated else out
            hidden = gate / (1 + np.exp(-gate)) * (out[1::2] if gated else 1)
            out = second[expert] @ rounded(hidden, down) + np.asarray(down_bias)[expert] * biased
            y[token] += weight * out
    return y


run = jax.jit(expert_mlp, static_argnames=("activation", "gated"))


def check(x, routing, experts, *, gated=True, biased=False, tolerance=1e-4, call=run):
    y = call(x, routing, *experts[: 4 if biased else 2], activation="silu", gated=gated)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), loop(x, routing, experts, gated=gated, biased=biased), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format(fmt, rows):
    """Rows that are multiplied in place, and sorted ones."""
    x = normal(4, rows, GROUP).astype("bfloat16" if fmt == "bfloat16" else "float32")
    tolerance = {"bfloat16": 3e-2, "int8": 2e-2}.get(fmt, 1e-4)  # int8: of a half, quantising may round either way
    check(x, gating(logits_of(rows, 8), 2), experts_of(8, GROUP, GROUP, fmt), tolerance=tolerance)


@pytest.mark.parametrize(("gated", "rows"), [(False, 3), (True, 3), (True, 70)])
def test_biases(gated, rows):
    check(
        normal(4, rows, 48), gating(logits_of(rows, 8), 2), experts_of(8, 48, 20, "float32", gated), gated=gated,
        biased=True,
    )  # fmt: skip


def test_awkward_routings():
    """One expert, all experts, many without any token, numbers of rows and experts that divide by nothing."""
    cases = [(130, 1, 1), (3, 4, 4), (1, 16, 3), (200, 5, 2)]  # rows, experts, choices
    args = [(normal(4, n, 32), logits_of(n, e), experts_of(e, 32, 16, "float32")) for n, e, _ in cases]

    @jax.jit
    def results(args):
        routings = [top_k_gating(logits, k) for (_, logits, _), (_, _, k) in zip(args, cases, strict=True)]
        return [
            (routing, expert_mlp(x, routing, *experts[:2], activation="silu", gated=True))
            for (x, _, experts), routing in zip(args, routings, strict=True)
        ]

    for (x, _, experts), (routing, y) in zip(args, results(args), strict=True):
        check(x, routing, experts, call=lambda *args, y=y, **options: y)


def test_numbers_of_inputs_that_are_not_whole_vectors():
    check(normal(4, 3, 33), gating(logits_of(3, 8), 2), experts_of(8, 33, 17, "float32"))


@pytest.mark.parametrize("rows", [3, 70])
def test_choices_over_capacity_add_nothing(rows):
    routing = gating(logits_of(rows, 8, "one"), 2, capacity=1)
    assert (np.asarray(routing.weights)[1:] == 0).all()
    check(normal(4, rows, 48), routing, experts_of(8, 48, 20, "float32"), biased=True)


@pytest.mark.parametrize("rows", [3, 70])
def test_experts_without_tokens_are_not_multiplied(rows):
    """One expert has all tokens. NaN in all others reaches no result."""
    x, routing = normal(4, rows, GROUP), gating(logits_of(rows, 8, "one"), 2)
    gate_up, down, *biases = experts_of(8, GROUP, GROUP, "float32")
    used = (np.asarray(routing.sizes) > 0)[:, None, None]
    assert used.sum() == 2
    broken = [Weights(np.where(used, weights.weight, np.float32(np.nan))) for weights in (gate_up, down)]
    y = run(x, routing, *broken, activation="silu", gated=True)
    np.testing.assert_allclose(y, loop(x, routing, (gate_up, down, *biases), gated=True, biased=False), atol=1e-4)


@pytest.mark.parametrize("rows", [3, 70])
def test_a_token_that_is_not_a_number_stays_alone_in_an_mlp(rows):
    x, routing = np.array(normal(4, rows, GROUP)), gating(logits_of(rows, 8), 2)
    experts = experts_of(8, GROUP, GROUP, "float32")[:2]
    expected = run(x, routing, *experts, activation="silu", gated=True)
    x[1] = np.nan
    y = np.asarray(run(x, routing, *experts, activation="silu", gated=True))
    others = np.arange(rows) != 1
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[others], np.asarray(expected)[others], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 70])
def test_within_a_loop(rows):
    """As decode steps and passes over layers call it, and as a program of a mesh does."""
    x, routing, experts = normal(4, rows, GROUP), gating(logits_of(rows, 8), 2), experts_of(8, GROUP, GROUP, "float32")
    call = functools.partial(expert_mlp, activation="silu", gated=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def three_times(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: call(x, routing, *experts[:2]), x)

    expected = x
    for _ in range(3):
        expected = run(expected, routing, *experts[:2], activation="silu", gated=True)
    np.testing.assert_allclose(three_times(np.array(x)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fmt", ["float32", "int8", "int4"])
def test_the_reference_is_the_loop(fmt):
    call = jax.jit(reference.expert_mlp, static_argnames=("activation", "gated"))
    tolerance = {"bfloat16": 3e-2, "int8": 2e-2}.get(fmt, 1e-4)
    x = normal(4, 5, GROUP).astype("bfloat16" if fmt == "bfloat16" else "float32")
    experts = experts_of(8, GROUP, GROUP, fmt)
    check(x, gating(logits_of(5, 8), 2), experts, biased=True, tolerance=tolerance, call=call)


@pytest.mark.parametrize("fmt", ["bfloat16", "int8", "int4"])
def test_grouped_products_of_every_format(fmt):
    x = normal(4, 20, GROUP).astype("bfloat16" if fmt == "bfloat16" else "float32")
    sizes = np.array([3, 0, 16, 0, 0, 1, 0, 0], np.int32)
    args = (x, experts_of(8, GROUP, GROUP, fmt)[1], np.cumsum(sizes, dtype=np.int32) - sizes, sizes)
    y, expected = jax.jit(lambda *args: (grouped_matmul(*args), reference.grouped_matmul(*args)))(*args)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(y, np.float32),
        np.asarray(expected, np.float32),
        rtol=2**-7,
        atol=2**-7 if fmt == "bfloat16" else 1e-5,
    )


def temporary_bytes(rows, fmt):
    """Of a program of 64 experts: of its temporary arrays, and of the experts' two stacks."""
    inputs, hidden = 256, 128

    def arguments():
        experts = (stored(jnp.zeros((64, *shape)), fmt) for shape in ((2 * hidden, inputs), (inputs, hidden)))
        return (
            jnp.zeros((rows, inputs), "bfloat16" if fmt == "bfloat16" else "float32"),
            gating(jnp.zeros((rows, 64)), 2),
            *experts,
        )

    args = jax.eval_shape(arguments)
    compiled = run.lower(*args, activation="silu", gated=True).compile()
    return compiled.memory_analysis().temp_size_in_bytes, [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stack)) for stack in args[2:]
    ]


@pytest.mark.parametrize(("fmt", "rows"), [*((fmt, 3) for fmt in FORMATS), ("float32", 16)])
def test_no_stack_is_copied_for_few_rows(fmt, rows):
    """Of 64 experts those that are chosen are read where they are: the program has no room for a tenth of them."""
    temporary, stacks = temporary_bytes(rows, fmt)
    partial_sums = 4 * rows * 2 * 32 * (2 * 128 + 256)
    copied = rows * 2 / 64 * sum(stacks) if fmt == "fp8" else 0  # bytes of what is chosen
    assert temporary < partial_sums + copied + sum(stacks) / 10


@pytest.mark.parametrize("fmt", ["float32", "int8", "fp8"])
def test_no_stack_is_copied_for_many_rows(fmt):
    temporary, stacks = temporary_bytes(70, fmt)
    assert temporary < stacks[0] / 4


def test_every_fp8_number_is_read():
    """Subnormal ones and zeros of both signs, too; there are no infinities, and no weight is NaN."""
    numbers = np.delete(np.arange(256, dtype=np.uint8), [127, 255])
    expected = numbers.view(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(in_place._fp8_floats)(numbers), expected)


def test_an_unknown_activation_is_refused():
    experts = experts_of(8, GROUP, GROUP, "float32")[:2]
    with pytest.raises(ValueError, match="got 'tan'"):
        run.eval_shape(normal(4, 3, GROUP), gating(logits_of(3, 8), 2), *experts, activation="tan", gated=True)


def test_padding_and_dropped_choices_read_no_expert_of_their_own():
    logits, valid = logits_of(6, 16), np.array([True, False, True, True, False, True])
    for capacity in (None, 1):
        routing = gating(logits, 2, valid=valid, capacity=capacity)
        read = set(np.asarray(jax.jit(in_place.read_experts)(routing)).ravel().tolist())
        assert read == set(np.flatnonzero(routing.sizes).tolist())
    assert set(np.asarray(routing.experts).ravel().tolist()) > read
