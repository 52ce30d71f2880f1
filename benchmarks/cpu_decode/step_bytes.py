"""Bytes that a whole decode step has to read: the weights as they are stored, with their scales, and the KV cache."""

import math

from jaxinfer.models import DecoderConfig, WeightFormat
from jaxinfer.models.leaves import canonical_leaves

QUANTISED = ("int8", "int4")
NARROW_KV = 2
"""Bytes of a key's or value's number beside quantised weights, as llama.cpp has them by default beside all."""


def weight_format(dtype: str) -> WeightFormat:
    """The format of a benchmark's dtype: a quantised model computes in float32."""
    import jax.numpy as jnp

    if dtype in QUANTISED:
        return WeightFormat(quantized=dtype)  # type: ignore[arg-type]
    return WeightFormat(dtype=jnp.dtype(dtype))


def matrix_bytes(config: DecoderConfig) -> int:
    """Count the float32 bytes of the matrices that a decode step reads: all but an embedding that is no head."""
    leaves = canonical_leaves(config, WeightFormat())
    matrices = {name: math.prod(leaf.shape) for name, leaf in leaves.items() if len(leaf.shape) == 2}
    return 4 * sum(size for name, size in matrices.items() if config.tied or name != "embed.table")


def weight_bytes(config: DecoderConfig, dtype: str) -> int:
    """Count the bytes of all weights of a dense model that a decode step reads, scales, norms and biases included."""
    leaves = canonical_leaves(config, weight_format(dtype))
    return sum(leaf.bytes for name, leaf in leaves.items() if config.tied or not name.startswith("embed."))


def kv_bytes(config: DecoderConfig, dtype: str, context: float) -> float:
    """Count the bytes of keys and values of all layers for one sequence, in a window at most its tokens."""
    mixers = [config.layer(layer).attention for layer in range(config.layers)]
    values = sum(min(context, mixer.window or context) * mixer.kv_values for mixer in mixers)
    size = NARROW_KV if dtype in QUANTISED else weight_format(dtype).dtype.itemsize
    return values * size


def step_bytes(config: DecoderConfig, dtype: str, context: float) -> float:
    """Count the bytes that a decode step at batch 1 reads."""
    return weight_bytes(config, dtype) + kv_bytes(config, dtype, context)
