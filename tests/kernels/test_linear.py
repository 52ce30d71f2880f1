"""Linear layers against float64 numpy, for row counts that platforms handle differently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.pallas_kernels import Weights, quantize_rows, small_batch_linear


@pytest.mark.parametrize("leading", [(), (1,), (1, 1), (3, 1), (2, 9)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_linear(leading, dtype, tolerance):
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(size=(*leading, 40)), rng.normal(size=(24, 40)) / 6, rng.normal(size=24)
    args = (jnp.asarray(x, dtype), jnp.asarray(weight, dtype), jnp.asarray(bias, jnp.float32))
    y = jax.jit(lambda x, weight, bias: small_batch_linear(x, Weights(weight), bias))(*args)
    rounded = [np.asarray(jnp.asarray(a, dtype)).astype(np.float64) for a in (x, weight)]
    exact = rounded[0] @ rounded[1].T + bias
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), exact, atol=tolerance, rtol=tolerance)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 100),
    rows=st.integers(1, 9),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 20),
)
def test_quantized_linear_is_the_matmul_of_its_quantised_operands(seed, rows, inputs, outputs):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    weight = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, outputs).astype(np.float32)
    q, x_scale = map(np.asarray, jax.jit(quantize_rows)(x))
    exact = (q.astype(np.int64) @ weight.T.astype(np.int64)) * x_scale.astype(np.float64) * scale
    y = jax.jit(small_batch_linear)(x, Weights(weight, scale))
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


def test_quantised_weights_stay_close_to_the_float_product():
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(5, 256)).astype(np.float32), rng.normal(size=(64, 256)).astype(np.float32)
    q, scale = map(np.asarray, quantize_rows(weight))
    y = small_batch_linear(x, Weights(q, scale[:, 0]), jnp.ones(64))
    error = np.abs(np.asarray(y) - (x @ weight.T + 1))
    # Two roundings of relative size 1/254 of the largest element, averaged over 256 terms.
    assert error.max() < 1.0
    assert error.mean() < 0.2


def test_quantize_rows_uses_the_whole_range_and_survives_zeros():
    q, scale = quantize_rows(jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    np.testing.assert_array_equal(q, [[64, -127, 32], [0, 0, 0]])
    np.testing.assert_allclose(scale[0], 2 / 127, rtol=1e-6)
    assert np.isfinite(scale).all()
