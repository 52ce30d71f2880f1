"""Formats of weight matrices: float, int8, fp8, int4.

A weight matrix is [N, K]: N outputs by K inputs, the inputs contiguous. At batch 1 a GPU reduces such rows without
writing an intermediate product to memory, and XLA:CPU multiplies one row by them faster than by [K, N]
(`docs/cpu-speed.md`). A stack of matrices, such as those of experts, has leading dimensions in every format, and each
of its matrices is stored as it would be alone.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

QuantizedFormat = Literal["int8", "int4", "fp8"]

STORED_AS: dict[QuantizedFormat, jnp.dtype] = {
    "int8": jnp.dtype(jnp.int8),
    "int4": jnp.dtype(jnp.uint16),  # four int4 values per word
    "fp8": jnp.dtype(jnp.float8_e4m3fn),
}
"""The dtype of each format's `Weights.weight`; it identifies the format."""

GROUP = 128
"""The int4 group size: consecutive inputs with one scale."""

NIBBLES = 4
"""int4 values per uint16 word."""

_WORDS = GROUP // NIBBLES  # per group
_CLIPS = (1.0, 0.9, 0.8)  # more candidates lower the error of Gaussian weights by less than 2%


class Weights(NamedTuple):
    """A matrix of N outputs by K inputs, the inputs contiguous, or a stack of them with leading dimensions (...).

    Attributes:
      weight: one of
        float [..., N, K] (bfloat16, float16, float32);
        int8 [..., N, K], multiplied by rows of x that are quantised dynamically (W8A8);
        float8_e4m3fn [..., N, K], weight-only;
        uint16 [..., N, K / 4], weight-only int4 in groups of GROUP inputs: word j of a group holds inputs j, j + 32,
        j + 64 and j + 96 of the group, the first in the lowest four bits, each plus 8. So one shift and mask of all
        words gives 32 consecutive inputs in order.
      scale: None for float; float32 [..., N] for int8 and fp8; bfloat16 [..., K / GROUP, N] for int4.
    """

    weight: jax.Array
    scale: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """..., N, K."""
        *leading, columns = self.weight.shape
        return *leading, columns * (NIBBLES if is_int4(self) else 1)


def is_int8(weights: Weights) -> bool:
    """Return whether the weights are int8, so that the matmul quantises the rows of x too."""
    return weights.weight.dtype == jnp.int8


def is_int4(weights: Weights) -> bool:
    """Return whether each word of the weight holds four int4 values."""
    return weights.weight.dtype == jnp.uint16


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantise each row symmetrically to int8, x ~ q * scale: [..., K] -> int8 [..., K], float32 [..., 1].

    DeepSpeed Inference, section III-C (dynamic activation quantisation). Weights are quantised so too, per output.
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-30) / 127.0
    return jnp.round(x / scale).astype(jnp.int8), scale


@jax.jit(static_argnames="fmt")
def quantize(matrix: jax.Array, fmt: QuantizedFormat) -> Weights:
    """Quantise matrices symmetrically, with round-to-nearest. matrix: float [..., N, K].

    Raises ValueError for an unknown format, and for int4 if K is not a multiple of GROUP.
    """
    if fmt == "int8":
        weight, scale = quantize_rows(matrix)
        return Weights(weight, scale[..., 0])
    if fmt == "fp8":
        return _quantize_fp8(matrix)
    if fmt == "int4":
        return _quantize_int4(matrix)
    raise ValueError(f"Unknown format {fmt!r} of weights; known: {', '.join(get_args(QuantizedFormat))}.")


def dequantize(weights: Weights, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Dequantise weights to float matrices [..., N, K], rounded to `dtype` at the end."""
    weight, scale = weights
    if scale is None:
        return weight.astype(dtype)
    if is_int4(weights):
        grouped = unpack_int4(weight).astype(jnp.float32) * jnp.swapaxes(scale.astype(jnp.float32), -1, -2)[..., None]
        return grouped.reshape(weights.shape).astype(dtype)
    return (weight.astype(jnp.float32) * scale[..., None]).astype(dtype)


def _quantize_fp8(matrix: jax.Array) -> Weights:
    matrix = matrix.astype(jnp.float32)
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    scale = jnp.maximum(jnp.max(jnp.abs(matrix), axis=-1), 1e-30) / largest
    return Weights((matrix / scale[..., None]).astype(jnp.float8_e4m3fn), scale)


def _quantize_int4(matrix: jax.Array) -> Weights:
    """Map the weight of largest magnitude in each group to -8 (with a negative scale if it is positive), so that all 16
    levels are used.

    Each group takes that scale or one of two smaller ones, which clip the largest weights: the one with the smallest
    squared error. On Gaussian weights the error is a sixth below that of the usual max|w| / 7.
    """
    *leading, inputs = matrix.shape
    if inputs % GROUP:
        raise ValueError(f"int4 needs inputs in groups of {GROUP}: a matrix of {inputs} inputs is not divisible.")
    groups = matrix.astype(jnp.float32).reshape(*leading, -1, GROUP)

    def rounded(clip: float) -> tuple[jax.Array, jax.Array, jax.Array]:
        scale = lax.reduce_precision(peak * (clip / -8), exponent_bits=8, mantissa_bits=7)  # as stored, in bfloat16
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
    return Weights(_pack_int4(levels), jnp.swapaxes(scale[..., 0], -1, -2).astype(jnp.bfloat16))


def _pack_int4(levels: jax.Array) -> jax.Array:
    """Pack integers from -8 to 7 as `Weights` describes: [..., N, K / GROUP, GROUP] -> uint16 [..., N, K / 4]."""
    nibbles = (levels + 8).astype(jnp.uint16).reshape(*levels.shape[:-1], NIBBLES, _WORDS)
    shifts = 4 * jnp.arange(NIBBLES, dtype=jnp.uint16)[:, None]
    return jnp.sum(nibbles << shifts, axis=-2, dtype=jnp.uint16).reshape(*levels.shape[:-2], -1)


def unpack_int4(weight: jax.Array) -> jax.Array:
    """Invert `_pack_int4`: int8 [..., N, K / GROUP, GROUP]."""
    words = weight.reshape(*weight.shape[:-1], -1, 1, _WORDS)
    shifts = 4 * jnp.arange(NIBBLES, dtype=jnp.uint16)[:, None]
    nibbles = (words >> shifts) & jnp.uint16(15)
    return nibbles.astype(jnp.int8).reshape(*weight.shape[:-1], -1, GROUP) - jnp.int8(8)
