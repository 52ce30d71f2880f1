"""Weight formats: round trips, quantisation errors, and matmuls against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.pallas_kernels import small_batch_linear, weights
from jaxinfer.pallas_kernels.weights import GROUP, Weights, dequantize, quantize

FORMATS = ["int8", "int4", "fp8"]
SEEDS = st.integers(0, 10_000)

# One program each, not one for each operation.
stored = jax.jit(quantize, static_argnums=1)
packed, unpacked = jax.jit(weights._pack_int4), jax.jit(weights.unpack_int4)
floats = jax.jit(lambda quantized: dequantize(quantized, jnp.float32))


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@settings(max_examples=10)
@given(seed=SEEDS, shape=st.sampled_from([(1, 2), (5, 3)]))
def test_packing_loses_nothing(seed, shape):
    outputs, groups = shape
    levels = np.random.default_rng(seed).integers(-8, 8, (outputs, groups, GROUP)).astype(np.int8)
    words = np.asarray(packed(levels))
    assert words.shape == (outputs, groups * GROUP // 4)
    np.testing.assert_array_equal(unpacked(words), levels)


def test_a_shift_and_mask_of_a_groups_words_give_consecutive_inputs():
    levels = np.arange(GROUP) % 16 - 8
    words = np.asarray(packed(levels[None, None]))[0]
    for run in range(4):
        np.testing.assert_array_equal((words >> 4 * run) & 15, levels[32 * run : 32 * (run + 1)] + 8)


@settings(max_examples=10)
@given(seed=SEEDS, fmt=st.sampled_from(FORMATS))
def test_quantised_values_survive_a_round_trip(seed, fmt):
    outputs, groups = 24, 2
    quantized = stored(_normal(seed, outputs, groups * GROUP), fmt)
    matrix = np.asarray(floats(quantized))
    assert quantized.shape == matrix.shape == (outputs, groups * GROUP)
    again = floats(stored(matrix, fmt))
    # Clipped int4 may choose a smaller scale the second time; the error stays within one rounding.
    tolerance = 0.15 * np.abs(matrix).max() if fmt == "int4" else 1e-6
    np.testing.assert_allclose(again, matrix, atol=tolerance)


@pytest.mark.parametrize(("fmt", "error"), [("int8", 0.009), ("int4", 0.100), ("fp8", 0.027)])
def test_relative_error_of_gaussian_weights(fmt, error):
    matrix = _normal(0, 64, 1024)
    rounded = np.asarray(floats(stored(matrix, fmt)))
    relative = np.sqrt(np.mean((rounded - matrix) ** 2) / np.mean(matrix**2))
    assert 0.8 * error < relative < error


def test_int4_beats_the_largest_weight_over_seven():
    matrix = _normal(1, 64, 8 * GROUP)
    groups = matrix.reshape(64, 8, GROUP)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / 7
    usual = np.square(np.clip(np.round(groups / scale), -8, 7) * scale - groups).sum()
    ours = np.square(np.asarray(floats(stored(matrix, "int4"))) - matrix).sum()
    assert ours < 0.75 * usual


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_stay_zeros(fmt):
    quantized = stored(np.zeros((24, 2 * GROUP), np.float32), fmt)
    np.testing.assert_array_equal(floats(quantized), 0)
    assert np.isfinite(np.asarray(quantized.scale, np.float32)).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("leading", [(), (3, 1), (2, 9)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmul_equals_that_of_the_dequantised_weights(fmt, leading, dtype):
    quantized = stored(_normal(2, 24, 2 * GROUP) / 16, fmt)
    x = _normal(3, *leading, 2 * GROUP).astype(dtype)
    y = jax.jit(small_batch_linear)(x, quantized)
    exact = np.asarray(x, np.float64) @ np.asarray(floats(quantized), np.float64).T
    assert y.dtype == dtype
    # int8 also rounds x: 256 uniformly distributed errors of at most max|x| / 254 each, times weights of 1/16.
    rounding = 4 / 254 / np.sqrt(3) if fmt == "int8" else 0.0
    tolerance = 4 * rounding + (2e-2 if dtype == jnp.bfloat16 else 1e-5)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, atol=tolerance, rtol=tolerance)


def test_int8_matmul_rounds_x_row_by_row_and_accumulates_exactly():
    quantized, x = stored(_normal(4, 24, 2 * GROUP), "int8"), _normal(5, 3, 2 * GROUP)
    q, x_scale = (np.asarray(a, np.float64) for a in jax.jit(weights.quantize_rows)(x))
    exact = q @ np.asarray(quantized.weight, np.float64).T * x_scale * np.asarray(quantized.scale, np.float64)
    np.testing.assert_allclose(jax.jit(small_batch_linear)(x, quantized), exact, rtol=1e-6)


def test_float_weights_are_multiplied_as_they_are():
    x, matrix = _normal(6, 5, 40), _normal(7, 24, 40)
    weight = Weights(jnp.asarray(matrix))
    np.testing.assert_allclose(jax.jit(small_batch_linear)(x, weight), x @ matrix.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(floats(weight), matrix)


def test_unsupported():
    with pytest.raises(ValueError, match="groups of 128: a matrix of 100 inputs"):
        quantize(jnp.asarray(np.ones((2, 100))), "int4")
    with pytest.raises(ValueError, match=r"'int3'.*int8, int4, fp8"):
        quantize(jnp.asarray(np.ones((2, 128))), "int3")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_stack_of_matrices_is_each_of_them(fmt):
    """Experts are [E, N, K], and are stored as each matrix would be alone."""
    matrices = _normal(5, 3, 24, 2 * GROUP)
    stack = stored(matrices, fmt)
    assert stack.shape == matrices.shape
    every = np.asarray(floats(stack))
    for i, matrix in enumerate(matrices):
        alone = stored(matrix, fmt)
        jax.tree.map(lambda leaf, one, i=i: np.testing.assert_array_equal(np.asarray(leaf)[i], one), stack, alone)
        np.testing.assert_array_equal(every[i], floats(alone))
