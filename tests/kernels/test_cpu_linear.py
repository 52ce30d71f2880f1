"""Linear layers in C++ against their definition, for each instruction set that this CPU has."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import Weights, linear_residual, norm_linear, small_batch_linear
from jaxinfer.pallas_kernels.cpu.library import use_library
from jaxinfer.pallas_kernels.dispatch import recorded_implementations
from jaxinfer.pallas_kernels.linear import cpu
from jaxinfer.pallas_kernels.linear import reference as plain
from jaxinfer.pallas_kernels.target import UnsupportedError
from jaxinfer.pallas_kernels.weights import dequantize, quantize
from tests.kernels.cpu_levels import LEVELS_OF_PRODUCTS, library_of

FORMATS = ("float32", "bfloat16", "int8", "int4")
SHAPES = [(128, 16), (384, 33), (1024, 62), (1000, 50), (17, 4), (1, 2), (130, 7), (128 * 49, 21)]
"""Inputs and outputs: of whole vectors, of parts of one, and of more groups than int4 multiplies at a time."""
ROWS = (1, 2, 3, 4, 5, 8, 13, 32)
TOLERANCES = {"float32": 3e-5, "bfloat16": 3e-5, "int8": 2e-4, "int4": 5e-4}
"""Of the largest result. Rows for int4 are in 16 bits; of int8 a tie may round the other way, in whole levels."""


quantized = jax.jit(quantize, static_argnums=1)


@pytest.fixture(params=LEVELS_OF_PRODUCTS)
def library(request):
    built = library_of(request.param)
    with use_library(built):
        yield built


def matrix(fmt, outputs, inputs, rng):
    values = rng.normal(size=(outputs, inputs)).astype(np.float32)
    if fmt in ("float32", "bfloat16"):
        return Weights(jnp.asarray(values.astype(fmt)))
    return quantized(values, fmt)


def check(actual, expected, tolerance):
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-6))


def results_of(calls):
    """Those of the kernel and of its definition for each call's arguments, in one program: compiling takes longest."""
    layers = cpu.linear, plain.linear
    return jax.device_get(jax.jit(lambda calls: [[linear(*args) for linear in layers] for args in calls])(calls))


def linear(*args):
    """The kernel in one program, of this library."""
    return np.asarray(jax.jit(lambda *args: cpu.linear(*args))(*args))


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_of_awkward_shapes(library, fmt):
    rng = np.random.default_rng(0)
    shapes = [(inputs, outputs) for inputs, outputs in SHAPES if fmt != "int4" or inputs % 128 == 0]
    matrices = [rng.normal(size=(outputs, inputs)).astype(np.float32) for inputs, outputs in shapes]
    calls = [
        [[rng.normal(size=size).astype(np.float32) for size in ((rows, inputs), outputs)] for rows in ROWS]
        for inputs, outputs in shapes
    ]

    @jax.jit
    def results(matrices, calls):
        weights = [
            quantize(values, fmt) if fmt.startswith("int") else Weights(values.astype(fmt)) for values in matrices
        ]
        every = [(x, one, bias) for one, some in zip(weights, calls, strict=True) for x, bias in some]
        return [[linear(*args) for linear in (cpu.linear, plain.linear)] for args in every]

    for actual, expected in results(matrices, calls):
        check(actual, expected, TOLERANCES[fmt])


@pytest.mark.parametrize(("fmt", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "float32")])
def test_more_rows_than_are_multiplied_at_a_time(library, fmt, dtype):
    """Where that was measured to be faster."""
    rng = np.random.default_rng(0)
    weights = matrix(fmt, 35, 200, rng)
    with use_library(dataclasses.replace(library, limits=((np.dtype(weights.weight.dtype).name, 128),))):
        for actual, expected in results_of(
            [(rng.normal(size=(rows, 200)).astype(dtype), weights) for rows in (48, 64, 70)]
        ):
            check(actual, expected, 1e-2 if dtype == "bfloat16" else TOLERANCES[fmt])


ACTIVATIONS = [
    (activation, gated) for activation in (None, "gelu", "gelu_tanh", "relu", "relu2", "silu") for gated in (0, 1)
]


def products(layers, x, residual, weights, scale, shift, bias, activations):
    """Return the results of products with all that comes before and after them."""
    results = [layers.linear_residual(x, weights, residual, bias)]
    for activation, gated in activations:
        options = {"eps": 1e-5, "activation": activation, "gated": bool(gated)}
        results.append(layers.norm_linear(x, scale, shift, weights, bias, **options))
    return [*results, layers.norm_linear(x, scale, None, weights, None, eps=1e-6)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_comes_before_and_after_the_product(library, fmt, dtype):
    """All activations for rows of each dtype with one format; some with each."""
    rng = np.random.default_rng(1)
    inputs, outputs, tolerance = 256, 34, 1e-2 if dtype == "bfloat16" or fmt == "int8" else TOLERANCES[fmt]
    weights = matrix(fmt, outputs, inputs, rng)
    scale, shift = rng.normal(size=(2, inputs)).astype(np.float32)
    bias = rng.normal(size=outputs).astype(np.float32)
    activations = ACTIVATIONS if fmt == "float32" else ((None, 0), ("gelu", 0), ("silu", 1))
    both = jax.jit(lambda *args: [products(layers, *args, activations) for layers in (cpu, plain)])
    for rows in (1, 6):
        x = (3 + rng.normal(size=(rows, inputs))).astype(dtype)
        residual = rng.normal(size=(rows, outputs)).astype(dtype)
        for result, exact in zip(*both(x, residual, weights, scale, shift, bias), strict=True):
            check(result, exact, tolerance)


def test_int8_at_its_ends_does_not_saturate(library):
    """All products are +-127 * 127: their sums of two do not fit into 16 bits if one factor is unsigned."""
    signs = np.random.default_rng(2).choice([-1, 1], (8, 640)).astype(np.int8)
    weights = Weights(jnp.asarray(127 * signs), jnp.ones(8, jnp.float32))
    for x in (np.ones((3, 640)), -np.ones((3, 640)), signs[:3]):
        exact = np.asarray(x, np.int64) @ (127 * signs.astype(np.int64)).T
        np.testing.assert_allclose(linear(x.astype(np.float32), weights), exact, rtol=1e-6)


def test_int4_at_its_ends_does_not_saturate(library):
    """Values of x are split into bytes, whose products with a group of 15s are summed in words by some instructions."""
    rng = np.random.default_rng(7)
    levels = 127 * 256 + 127  # the largest, so that a scale is 1
    words = np.concatenate([np.full((1, 64), 0xFFFF), np.zeros((1, 64)), rng.integers(0, 1 << 16, (6, 64))])
    weights = Weights(jnp.asarray(words, jnp.uint16), jnp.ones((2, 8), jnp.bfloat16))
    ends = np.array([levels, -levels, 127 * 256 - 128, 127, -128])
    values = np.repeat(ends[:, None], 256, axis=1)
    values = np.concatenate([values, rng.integers(-levels, levels + 1, (3, 256))])
    values[:, ::128] = levels
    exact = values @ np.asarray(jax.jit(lambda w: dequantize(w, jnp.float32))(weights), np.int64).T
    # The weights are multiplied as 0 to 15, by which sums reach 1.3e8, where float32 is in steps of 8.
    np.testing.assert_allclose(linear(values.astype(np.float32), weights), exact, rtol=1e-6, atol=8)


def test_smallest_int8_weight(library):
    """No quantisation of ours makes -128, but a file may have it."""
    weights = Weights(jnp.full((5, 64), -128, jnp.int8), jnp.ones(5, jnp.float32))
    np.testing.assert_allclose(linear(np.ones((1, 64), np.float32), weights), np.full((1, 5), -128 * 64.0), rtol=1e-6)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_one_far_value_leaves_the_others_of_its_group(library, fmt):
    """int4 rows have a scale a group: a far value takes the precision of 127 others, not of the row."""
    rng = np.random.default_rng(3)
    weights = matrix(fmt, 16, 512, rng)
    x = rng.normal(size=(2, 512)).astype(np.float32)
    x[:, 5] = 3e4
    rest = np.where(np.arange(512) < 128, np.float32(0), x)  # the same bits of the other groups
    for actual, expected in results_of([(x, weights), (rest, weights)][: 2 if fmt == "int4" else 1]):
        check(actual, expected, TOLERANCES[fmt])


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_not_finite_stays_in_its_row(library, fmt):
    rng = np.random.default_rng(4)
    weights = matrix(fmt, 20, 256, rng)
    program = jax.jit(lambda *args: cpu.linear(*args))
    x = rng.normal(size=(5, 256)).astype(np.float32)
    clean = np.asarray(program(x, weights))
    for bad in (np.nan, np.inf, -np.inf):
        x[2, 7] = bad
        y = np.asarray(program(x, weights))
        assert not np.isfinite(y[2]).any()
        np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_where_it_stands(library, fmt):
    """Several rows are computed alike; one alone may round differently, as it has sums of its own."""
    rng = np.random.default_rng(5)
    weights = matrix(fmt, 24, 384, rng)
    x, program = rng.normal(size=(32, 384)).astype(np.float32), jax.jit(lambda *args: cpu.linear(*args))
    alone = np.concatenate([program(x[i : i + 1], weights) for i in range(32)])
    together = np.asarray(program(x, weights))
    check(together, alone, 1e-6)
    np.testing.assert_array_equal(together, program(x, weights))


def test_activations_over_their_range(library):
    values = np.float32([*np.linspace(-120, 120, 4001), 0.0, -0.0, 1e-30, -1e-30, 88.7, -88.7])
    nothing = Weights(jnp.zeros((len(values), 1), jnp.float32))  # so that the biases are what is activated
    args = jnp.ones((1, 1)), jnp.ones(1), None, nothing, values
    for activation in ("gelu", "gelu_tanh", "relu", "relu2", "silu"):
        both = jax.jit(lambda *a, f=activation: [x.norm_linear(*a, eps=0.0, activation=f) for x in (cpu, plain)])
        np.testing.assert_allclose(*both(*args), rtol=1e-5, atol=3e-6)


def test_operations_run_it_within_its_limits(library):
    rng = np.random.default_rng(6)
    weights = matrix("float32", 8, 64, rng)

    def implementation(operation, *args, **options):
        with recorded_implementations() as used:
            jax.eval_shape(functools.partial(operation, **options), *args)
        return next(iter(list(used.values())[-1])).name  # the outermost ends last

    few, many = jnp.ones((32, 64)), jnp.ones((1000, 64))
    scale = jnp.ones(64)
    assert implementation(small_batch_linear, few, weights) == "ffi"
    assert implementation(norm_linear, few, scale, None, weights, eps=1e-5) == "ffi"
    assert implementation(linear_residual, few, weights, jnp.ones((32, 8))) == "ffi"
    assert implementation(small_batch_linear, many, weights) == "composed"
    assert implementation(small_batch_linear, few.astype(jnp.float16), weights) == "composed"


@pytest.mark.parametrize(
    ("x", "weights", "message"),
    [
        (jnp.ones((1, 64), jnp.float16), Weights(jnp.ones((8, 64))), "x must be float32 or bfloat16, got float16"),
        (jnp.ones((1, 64)), Weights(jnp.ones((8, 64), jnp.float16)), "weights must be .*, got float16"),
        (jnp.ones((0, 64)), Weights(jnp.ones((8, 64))), "nothing to multiply"),
    ],
)
def test_what_it_does_not_take_is_refused(library, x, weights, message):
    with pytest.raises(UnsupportedError, match=message):
        cpu.linear(x, weights)
