"""Arguments of foreign functions: which products in C++ take, and how they are passed."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels.target import UnsupportedError
from jaxinfer.pallas_kernels.weights import Weights, is_int4, is_int8

ACTIVATIONS = (None, "gelu", "gelu_tanh", "relu", "silu", "relu2")
"""In the order of `Activation` in activations.h."""

_FLOATS = (jnp.float32, jnp.bfloat16)


def check_product(x: jax.Array, weights: Weights, *vectors: jax.Array | None) -> None:
    """Raise UnsupportedError unless the products in C++ take x, these weights and vectors (norms, biases)."""
    if x.dtype not in _FLOATS:
        raise UnsupportedError(f"x must be float32 or bfloat16, got {x.dtype}")
    weight, scale = weights
    if not (is_int8(weights) or is_int4(weights) or (weight.dtype in _FLOATS and scale is None)):
        raise UnsupportedError(f"weights must be float32, bfloat16, int8 or int4, got {weight.dtype}")
    if not x.size or not weight.size:
        raise UnsupportedError("there is nothing to multiply")
    for vector in vectors:
        if vector is not None and vector.dtype != jnp.float32:
            raise UnsupportedError(f"vectors must be float32, got {vector.dtype}")


def activation_number(name: str | None) -> np.int32:
    """Return what `Activation` in activations.h calls an activation. Raises UnsupportedError."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"activation must be one of {ACTIVATIONS}, got {name!r}")
    return np.int32(ACTIVATIONS.index(name))


def or_empty(x: jax.Array | None) -> jax.Array:
    """Return the argument, or an empty array for None."""
    return jnp.zeros(0, jnp.float32) if x is None else x
