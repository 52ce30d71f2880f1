"""An MLP of experts for few rows on a CPU, which reads their weights where they are.

XLA:CPU copies a matrix out of its stack before it multiplies it, which takes two to three times as long as the product
of one row. A sum of elementwise products is a loop over the stack itself, in which the rows of one output lie beside
each other: experts that several rows have chosen are read once, those that none has not at all, and the outputs of even
one expert are computed by all cores.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.activations import activate_outputs
from jaxinfer.pallas_kernels.moe.routing import Routing
from jaxinfer.pallas_kernels.target import UnsupportedError
from jaxinfer.pallas_kernels.weights import GROUP, NIBBLES, Weights, is_int4, is_int8, quantize_rows

_MOST_CHOICES = 128  # rows of all tokens together; with more, products of sorted rows are faster
_MOST_CHOICES_OF = {jnp.dtype(fast): 32 for fast in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)}
"""Fewer in formats that matrix units multiply, and in fp8, of which the choices are copied."""
_LANES = 16  # partial sums of an output, at least: vectors of float32
_TERMS = 32  # products of a partial sum, about: more take longer to compile


def expert_mlp(
    x: jax.Array,
    routing: Routing,
    gate_up: Weights,
    down: Weights,
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    *,
    activation: str,
    gated: bool,
) -> jax.Array:
    """Multiply a row for each choice, and sum those of each token. Arguments as of `api`. Raises UnsupportedError."""
    tokens, k = routing.experts.shape
    most = _MOST_CHOICES_OF.get(gate_up.weight.dtype, _MOST_CHOICES)
    if tokens * k > most:
        raise UnsupportedError(f"only up to {most} rows are multiplied in place, got {tokens * k}")
    experts = read_experts(routing).reshape(-1)

    def linear(rows: jax.Array, weights: Weights, bias: jax.Array | None) -> jax.Array:
        y = _product(rows, weights, experts)
        return (y if bias is None else y + bias[experts]).astype(x.dtype)

    hidden = activate_outputs(linear(jnp.repeat(x, k, axis=0), gate_up, gate_up_bias), activation, gated=gated)
    y = linear(hidden, down, down_bias).reshape(tokens, k, -1).astype(jnp.float32)
    kept = routing.rows < len(routing.tokens)
    return jnp.sum(jnp.where(kept[..., None], y, 0.0) * routing.weights[..., None], axis=1).astype(x.dtype)


def read_experts(routing: Routing) -> jax.Array:
    """The expert that each choice reads, int32 [N, k]: one that is dropped reads an expert that others read."""
    kept = routing.rows < len(routing.tokens)
    return jnp.where(kept, routing.experts, routing.experts.reshape(-1)[jnp.argmax(kept)])


def _product(x: jax.Array, weights: Weights, experts: jax.Array) -> jax.Array:
    """x[r] W[experts[r]]^T in float32: [R, K] -> [R, N]."""
    if is_int4(weights):
        return _int4_product(x.astype(jnp.float32), weights, experts)
    weight, scale = weights
    x_scale = None
    if is_int8(weights):
        x, x_scale = quantize_rows(x)
    lanes, chosen = _lanes(x.shape[1]), None
    x = x.astype(jnp.float32)
    if weight.dtype == jnp.float8_e4m3fn:
        # XLA:CPU converts a whole stack of fp8 before it takes anything out of it, and copies one that several products
        # read as bytes. So the bytes of the chosen experts are copied, a quarter of what float32 would read.
        chosen = lax.optimization_barrier(_of_experts(lax.bitcast_convert_type(weight, jnp.uint8), experts))

    def term(first: int) -> jax.Array:
        columns = slice(first, first + lanes)
        if chosen is not None:
            return _fp8_floats(chosen[..., columns]) * x[:, columns]
        return _of_experts(weight[..., columns], experts).astype(jnp.float32) * x[:, columns]

    y = _sum_of_lanes([term(first) for first in range(0, x.shape[1], lanes)])
    y = y if scale is None else y * scale[experts]
    return y if x_scale is None else y * x_scale


def _fp8_floats(weight: jax.Array) -> jax.Array:
    """The numbers in float32 that bytes represent in float8_e4m3fn: a float16 of these bits, times 256."""
    bits = weight.astype(jnp.uint16)
    halves = lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16)
    return halves.astype(jnp.float32) * 256.0


def _int4_product(x: jax.Array, weights: Weights, experts: jax.Array) -> jax.Array:
    """x[r] W[experts[r]]^T in float32: [R, K] -> [R, N]. Lanes are the words of some groups, of four nibbles each."""
    assert weights.scale is not None
    count, outputs, inputs = weights.shape
    groups, words = inputs // GROUP, GROUP // NIBBLES
    packed, runs = weights.weight.reshape(count, outputs, groups, words), x.reshape(-1, groups, NIBBLES, words)
    scales = jnp.swapaxes(weights.scale, 1, 2)[..., None]  # [E, N, groups, 1]
    step = next(n for n in range(-(-groups * NIBBLES // _TERMS), groups + 1) if groups % n == 0)

    def term(first: int) -> jax.Array:
        some = slice(first, first + step)
        nibbles = _of_experts(packed[:, :, some], experts)
        levels = [((nibbles >> 4 * run) & 15).astype(jnp.float32) - 8.0 for run in range(NIBBLES)]
        total = functools.reduce(operator.add, (levels[run] * runs[:, some, run] for run in range(NIBBLES)))
        return total * _of_experts(scales[:, :, some], experts).astype(jnp.float32)

    return _sum_of_lanes([term(first) for first in range(0, groups, step)])


def _lanes(inputs: int) -> int:
    """Return into how many partial sums a product of so many inputs is divided: a power of two. UnsupportedError."""
    if inputs % _LANES:
        raise UnsupportedError(f"inputs must be a multiple of {_LANES} to be multiplied in place, got {inputs}")
    lanes = _LANES
    while inputs % (2 * lanes) == 0 and inputs // lanes > _TERMS:
        lanes *= 2
    return lanes


def _of_experts(leaf: jax.Array, experts: jax.Array) -> jax.Array:
    """Compute the matrices of each row's expert, outputs first: [E, N, ...] -> [N, R, ...].

    Outputs first, so that the rows of one expert read each of its outputs' inputs together, while the caches have them.
    """
    others = tuple(range(2, leaf.ndim))
    dimensions = lax.GatherDimensionNumbers(offset_dims=(0, *others), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(leaf, experts[:, None], dimensions, (1, *leaf.shape[1:]), mode="clip")


def _sum_of_lanes(terms: list[jax.Array]) -> jax.Array:
    """Sum terms, each [N, R, lanes...], and their lanes: [R, N].

    The barrier keeps XLA from making one reduction of both sums, which would neither be vectorised nor read in place.
    """
    partial = lax.optimization_barrier(functools.reduce(operator.add, terms))
    partial = partial.reshape(*partial.shape[:2], -1)
    while (lanes := partial.shape[-1]) % 2 == 0:
        partial = partial[..., : lanes // 2] + partial[..., lanes // 2 :]
    return jnp.sum(partial, axis=-1).T
