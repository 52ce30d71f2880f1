"""How a matrix of weights is held: in float, int8, fp8 or int4; and what its product with x is.

A weight is [N, K]: N outputs of K inputs each, the inputs contiguous. A GPU reduces such rows at batch 1 without
writing the product to memory; XLA:CPU, too, multiplies one row by them faster than by [K, N] (`docs/cpu-speed.md`).
Start at `Weights`, then `product`.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

QuantizedFormat = Literal["int8", "int4", "fp8"]

STORED_AS: dict[QuantizedFormat, jnp.dtype] = {
    "int8": jnp.dtype(jnp.int8),
    "int4": jnp.dtype(jnp.uint16),  # four to a word
    "fp8": jnp.dtype(jnp.float8_e4m3fn),
}
"""The dtype of each format's kernel, which tells the format."""

GROUP = 128
"""Inputs that share a scale in int4."""

NIBBLES = 4
"""Inputs that share a word in int4."""

_WORDS = GROUP // NIBBLES  # of a group
_CLIPS = (1.0, 0.9, 0.8)  # more candidates lower the error of Gaussian weights by less than 2%
_FEW_ROWS = 16  # of x; beyond them a matrix of floats is smaller than the products of every group


class Weights(NamedTuple):
    """A matrix of N outputs by K inputs, the inputs contiguous.

    Attributes:
      kernel: one of
        float [N, K] (bfloat16, float16, float32);
        int8 [N, K], multiplied by rows of x that are quantised on the fly;
        float8_e4m3fn [N, K], weights only;
        uint16 [N, K / 4], int4 in groups of GROUP inputs, weights only: word j of a group holds its inputs j,
        j + 32, j + 64 and j + 96, the first in the lowest four bits, each plus 8. So one shift and mask of all
        words gives a run of inputs, in order.
      scale: None in float; float32 [N] for int8 and fp8; bfloat16 [K / GROUP, N] for int4.
    """

    kernel: jax.Array
    scale: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        outputs, columns = self.kernel.shape
        return outputs, columns * (NIBBLES if is_int4(self) else 1)


def is_int8(weights: Weights) -> bool:
    """Whether rows of x are quantised for the product, too."""
    return weights.kernel.dtype == jnp.int8


def is_int4(weights: Weights) -> bool:
    """Whether four weights share a word of the kernel."""
    return weights.kernel.dtype == jnp.uint16


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 per row: x ~ q * scale. x: [..., K] -> int8 [..., K], float32 [..., 1].

    DeepSpeed Inference, section III-C (dynamic activation quantisation); weights use it with K last.
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-30) / 127.0
    return jnp.round(x / scale).astype(jnp.int8), scale


@jax.jit(static_argnames="fmt")
def quantize(matrix: jax.Array, fmt: QuantizedFormat) -> Weights:
    """The nearest weights in this format, symmetric about 0. matrix: float [N, K].

    Raises ValueError for an unknown format, and in int4 where K is not a multiple of GROUP.
    """
    if fmt == "int8":
        kernel, scale = quantize_rows(matrix)
        return Weights(kernel, scale[:, 0])
    if fmt == "fp8":
        return _quantize_fp8(matrix)
    if fmt == "int4":
        return _quantize_int4(matrix)
    raise ValueError(f"Unknown format {fmt!r} of weights; known: {', '.join(get_args(QuantizedFormat))}.")


def dequantize(weights: Weights, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The matrix [N, K] that the weights stand for, rounded to `dtype` at the end."""
    kernel, scale = weights
    if scale is None:
        return kernel.astype(dtype)
    if is_int4(weights):
        grouped = _unpack(kernel).astype(jnp.float32) * scale.astype(jnp.float32).T[:, :, None]
        return grouped.reshape(weights.shape).astype(dtype)
    return (kernel.astype(jnp.float32) * scale[:, None]).astype(dtype)


def product(x: jax.Array, weights: Weights) -> jax.Array:
    """x W^T. x: [..., K]; weights: [N, K]. Returns [..., N] in x's dtype, accumulated in float32 (int8: int32).

    Int8 weights also round x, row by row (`quantize_rows`).
    """
    kernel, scale = weights
    if scale is None:
        return contract(x, kernel)
    if is_int4(weights):
        return _int4_product(x, kernel, scale)
    if is_int8(weights):
        return int8_product(*quantize_rows(x), kernel, scale).astype(x.dtype)
    y = contract(x, kernel.astype(x.dtype), accumulator=jnp.float32)
    return (y * scale).astype(x.dtype)  # after the product: XLA would write out a matrix scaled before it


def int8_product(q: jax.Array, q_scale: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """(q * q_scale) (kernel * scale)^T, accumulated in int32: int8 [..., K] and [N, K] -> float32 [..., N]."""
    return contract(q, kernel, accumulator=jnp.int32).astype(jnp.float32) * q_scale * scale


def contract(x: jax.Array, kernel: jax.Array, accumulator: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x W^T as XLA has it. x: [..., K]; kernel: [N, K]. Returns [..., N], of dtype `accumulator` or else x's."""

    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=accumulator)

    def product_of_two_rows(x: jax.Array, kernel: jax.Array) -> jax.Array:
        rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
        return product(rows, kernel)[0].reshape(*x.shape[:-1], -1)

    if x.size == x.shape[-1] and x.dtype != jnp.float32:
        # XLA:CPU has no fast path for one row in anything but float32, and multiplies element by element.
        return lax.platform_dependent(x, kernel, cpu=product_of_two_rows, default=product)
    return product(x, kernel)


def _quantize_fp8(matrix: jax.Array) -> Weights:
    matrix = matrix.astype(jnp.float32)
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    scale = jnp.maximum(jnp.max(jnp.abs(matrix), axis=-1), 1e-30) / largest
    return Weights((matrix / scale[:, None]).astype(jnp.float8_e4m3fn), scale)


def _quantize_int4(matrix: jax.Array) -> Weights:
    """The largest weight of a group becomes -8 (its scale is negative then, if need be), so that no level is lost.

    Of that scale and two smaller ones, which clip the largest weights, the group takes the one with the least
    squared error: a sixth below that of max|w| / 7, on Gaussian weights.
    """
    outputs, inputs = matrix.shape
    if inputs % GROUP:
        raise ValueError(f"int4 holds inputs in groups of {GROUP}: a matrix of {inputs} inputs has no whole number.")
    groups = matrix.astype(jnp.float32).reshape(outputs, -1, GROUP)

    def rounded(clip: float) -> tuple[jax.Array, jax.Array, jax.Array]:
        scale = lax.reduce_precision(peak * (clip / -8), exponent_bits=8, mantissa_bits=7)  # what bfloat16 can hold
        scale = jnp.where(scale == 0, 1.0, scale)
        levels = jnp.clip(jnp.round(groups / scale), -8, 7)
        return jnp.sum((groups - levels * scale) ** 2, axis=-1, keepdims=True), levels, scale

    largest = jnp.argmax(jnp.abs(groups), axis=-1, keepdims=True)
    peak = jnp.take_along_axis(groups, largest, axis=-1)
    error, levels, scale = rounded(_CLIPS[0])
    for clip in _CLIPS[1:]:
        candidate = rounded(clip)
        better = candidate[0] < error
        error, levels, scale = (
            jnp.where(better, *pair) for pair in zip(candidate, (error, levels, scale), strict=True)
        )
    return Weights(_pack(levels), scale[:, :, 0].T.astype(jnp.bfloat16))


def _pack(levels: jax.Array) -> jax.Array:
    """Integers from -8 to 7 [N, K / GROUP, GROUP] -> uint16 [N, K / 4], as `Weights` says."""
    nibbles = (levels + 8).astype(jnp.uint16).reshape(*levels.shape[:-1], NIBBLES, _WORDS)
    shifts = 4 * jnp.arange(NIBBLES, dtype=jnp.uint16)[:, None]
    return jnp.sum(nibbles << shifts, axis=-2, dtype=jnp.uint16).reshape(levels.shape[0], -1)


def _unpack(kernel: jax.Array) -> jax.Array:
    """The inverse of `_pack`: int8 [N, K / GROUP, GROUP]."""
    words = kernel.reshape(kernel.shape[0], -1, 1, _WORDS)
    shifts = 4 * jnp.arange(NIBBLES, dtype=jnp.uint16)[:, None]
    nibbles = (words >> shifts) & jnp.uint16(15)
    return nibbles.astype(jnp.int8).reshape(kernel.shape[0], -1, GROUP) - jnp.int8(8)


def _int4_product(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """At few rows the scales come after the products of each group, so that no matrix of floats is written."""
    rows = x.size // x.shape[-1]
    if rows > _FEW_ROWS:
        return contract(x, dequantize(Weights(kernel, scale), x.dtype), accumulator=jnp.float32).astype(x.dtype)
    grouped = x.reshape(rows, -1, GROUP)
    partial = jnp.einsum("bgk,ngk->bgn", grouped, _unpack(kernel).astype(x.dtype), preferred_element_type=jnp.float32)
    y = jnp.sum(partial * scale.astype(jnp.float32), axis=1)
    return y.astype(x.dtype).reshape(*x.shape[:-1], -1)
