"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464), with the causal convolution before it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.choices import example_arguments
from jaxinfer.pallas_kernels.delta_rule import cpu
from jaxinfer.pallas_kernels.delta_rule import mosaic as kernels
from jaxinfer.pallas_kernels.delta_rule import reference as plain
from jaxinfer.pallas_kernels.delta_rule import xla as fallbacks
from jaxinfer.pallas_kernels.delta_rule.recurrent_state import RecurrentState, Window
from jaxinfer.pallas_kernels.delta_rule.window import Inputs, over_window
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import ffi, mosaic, reference, xla

__all__ = ["RecurrentState", "Window", "gated_delta_rule"]


def _own_slots(*shapes: Any) -> tuple[Any, ...]:
    """Make arguments to measure with: rows of different slots, in the midst of their sequences."""
    *arguments, slot, positions = example_arguments(*shapes[:7])
    at = jnp.broadcast_to(1 + jnp.arange(positions.shape[1], dtype=jnp.int32), positions.shape)
    return *arguments, jnp.arange(slot.size, dtype=jnp.int32), at, *(jnp.ones(x.shape, x.dtype) for x in shapes[7:])


_everywhere = (
    ffi(cpu.gated_delta_rule),
    xla(fallbacks.gated_delta_rule),
    reference(plain.gated_delta_rule),
)
_delta_rule_step = Operation("delta_rule_step", mosaic(kernels.delta_rule_step), *_everywhere, example=_own_slots)
_gated_delta_rule = Operation("gated_delta_rule", mosaic(kernels.gated_delta_rule), *_everywhere, example=_own_slots)


def gated_delta_rule(
    qkv: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    conv_weight: jax.Array,
    cache: RecurrentState,
    slot: jax.Array,
    positions: jax.Array,
    *,
    key_dim: int,
    speculates: bool = False,
) -> tuple[jax.Array, RecurrentState]:
    """Move each row's state on by its tokens, and return what their queries read from it.

    On a GPU, rows of a single token have a kernel of their own.

    Queries, keys and values are silu(conv(qkv)); a query head serves the value heads of its key head, and queries and
    keys are scaled to length 1. Then, for each token, S = exp(decay) S; S += k (beta (v - S^T k))^T; o = S^T q.

    Args:
      qkv: [B, T, Hk, F]; of each key head its query [K], its key [K] and its Hv / Hk values [V]. F = 2 K + Hv / Hk V.
      decay: float32 [B, T, Hv], at most 0. beta: float32 [B, T, Hv].
      conv_weight: [Hk, F, L]; the last weight is of the token itself.
      cache: the states of all slots; updated in place if the caller donates it.
      slot: int32 [B]. Rows of one slot are consecutive parts of its sequence, in order, and rows of a single token are
        of different slots. What a padding row has in its slot stays.
      positions: int32 [B, T], negative for padding, which comes last and moves no state. A row whose first position is
        0 begins with a state of zeros, whatever its slot has. If the cache has a window, a row of a single token, or of
        one and guesses, begins after those guesses of the last pass that were right.
      key_dim: K.
      speculates: whether all tokens of a row but its first are guesses, which may turn out wrong: as many as the
        cache's window has room for. Rows are of different slots.
    Returns: float32 [B, T, Hv, V], without meaning for padding, and the new states.
    """

    def rule(inputs: Inputs, states: RecurrentState, slot: jax.Array, positions: jax.Array, *kept: jax.Array):
        operation = _delta_rule_step if positions.shape[1] == 1 else _gated_delta_rule
        return operation(*inputs, conv_weight, states, slot, positions, *kept, key_dim=key_dim)

    inputs = qkv, decay, beta
    if cache.window is None:
        assert not speculates, "guesses need a window"
        return rule(inputs, cache, slot, positions)
    return over_window(rule, inputs, cache, slot, positions, speculates=speculates)
