"""Rotary embedding against multiplication by complex numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.rotary import rotate


@pytest.mark.parametrize("half", [4, 8])
def test_pairs_rotate_as_complex_numbers_and_the_rest_is_unchanged(half):
    rng = np.random.default_rng(0)
    x, angle = rng.normal(size=(2, 3, 5, 16)), rng.normal(size=(2, 3, 1, half))
    rotated = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)
    expected = np.concatenate([rotated.real, rotated.imag, x[..., 2 * half :]], axis=-1)
    rotary = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    np.testing.assert_allclose(rotate(jnp.asarray(x, jnp.float32), rotary), expected, atol=1e-5)


def test_the_dtype_is_kept_and_rounded_once():
    x, ones = jnp.full((1, 1, 4), 1.5, jnp.bfloat16), jnp.ones((1, 1, 2), jnp.float32)
    rotated = rotate(x, (ones * 1.003, ones * 0))
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, jnp.full((1, 1, 4), 1.5 * 1.003, jnp.bfloat16))
