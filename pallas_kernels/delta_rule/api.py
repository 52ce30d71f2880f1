"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464), with the causal convolution before it."""

import jax

from jaxinfer.pallas_kernels.delta_rule import reference as plain
from jaxinfer.pallas_kernels.delta_rule import xla as fallbacks
from jaxinfer.pallas_kernels.delta_rule.recurrent_state import RecurrentState
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import reference, xla

__all__ = ["RecurrentState", "gated_delta_rule"]

_gated_delta_rule = Operation("gated_delta_rule", xla(fallbacks.gated_delta_rule), reference(plain.gated_delta_rule))


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
) -> tuple[jax.Array, RecurrentState]:
    """Move each row's state on by its tokens, and return what their queries read from it.

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
        0 begins with a state of zeros, whatever its slot has.
      key_dim: K.
    Returns: float32 [B, T, Hv, V], without meaning for padding, and the new states.
    """
    return _gated_delta_rule(qkv, decay, beta, conv_weight, cache, slot, positions, key_dim=key_dim)
