"""Linear layers of a few rows on a CPU, in C++ (`linear.h`): norm, product, bias, activation and residual are one call.

The matrix is read where it is, once, in the order of memory. Rows of x are in float32, for int8 weights in int8 as
everywhere, for int4 weights in whole numbers of 16 bits with a scale for each group of inputs.
"""

import jax
import numpy as np

from jaxinfer.pallas_kernels.cpu.arguments import activation_number, check_product, or_empty
from jaxinfer.pallas_kernels.cpu.library import ffi_call, most_rows
from jaxinfer.pallas_kernels.target import UnsupportedError
from jaxinfer.pallas_kernels.weights import Weights


def linear(x: jax.Array, weights: Weights, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b. Arguments as of `api`. Raises UnsupportedError."""
    return _call(x, weights, bias=bias)


def norm_linear(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array | None,
    weights: Weights,
    bias: jax.Array | None = None,
    *,
    eps: float,
    activation: str | None = None,
    gated: bool = False,
) -> jax.Array:
    """act(norm(x) W^T + b). Arguments as of `api`. Raises UnsupportedError."""
    return _call(x, weights, norm=(scale, shift), bias=bias, eps=eps, activation=activation, gated=gated)


def linear_residual(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """residual + (x W^T + b). Arguments as of `api`. Raises UnsupportedError."""
    if residual.dtype != x.dtype:
        raise UnsupportedError(f"the residual must have x's dtype, {x.dtype}; got {residual.dtype}")
    return _call(x, weights, bias=bias, residual=residual)


def _call(
    x: jax.Array,
    weights: Weights,
    *,
    norm: tuple[jax.Array | None, jax.Array | None] = (None, None),
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    gated: bool = False,
) -> jax.Array:
    check_product(x, weights, bias, *norm)
    rows, (outputs, _) = x.size // x.shape[-1], weights.shape
    if rows > (most := most_rows(weights.weight.dtype)):
        raise UnsupportedError(f"XLA multiplies more than {most} rows by {weights.weight.dtype} weights, got {rows}")
    result = jax.ShapeDtypeStruct((*x.shape[:-1], outputs // 2 if gated else outputs), x.dtype)
    return ffi_call(
        "jaxinfer_linear",
        result,
        x,
        *map(or_empty, norm),
        *map(or_empty, weights),
        or_empty(bias),
        or_empty(residual),
        eps=np.float32(eps),
        activation=activation_number(activation),
        gated=np.int32(gated),
    )
