"""Bytes of a whole decode step: the weights as they are stored, with their scales, the KV cache, recurrent states."""

import math

from jaxinfer.models import DecoderConfig, WeightFormat
from jaxinfer.models.leaves import canonical_leaves, state_leaves

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
    kinds = [config.layer(layer) for layer in range(config.layers)]
    mixers = [kind.attention for kind in kinds if kind.has_attention]
    values = sum(min(context, mixer.window or context) * mixer.kv_values for mixer in mixers)
    size = NARROW_KV if dtype in QUANTISED else weight_format(dtype).dtype.itemsize
    return values * size


def state_bytes(config: DecoderConfig, dtype: str) -> int:
    """Count the bytes of the recurrent states of one sequence, read and written."""
    return 2 * sum(leaf.bytes for leaf in state_leaves(config, weight_format(dtype), 1).values())


def step_bytes(config: DecoderConfig, dtype: str, context: float) -> float:
    """Count the bytes that a decode step at batch 1 reads, and those of states, which it writes as well."""
    return weight_bytes(config, dtype) + kv_bytes(config, dtype, context) + state_bytes(config, dtype)
