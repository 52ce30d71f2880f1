"""The LoRA adapters of one layer, as arrays on the device (arXiv:2106.09685)."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxinfer.pallas_kernels import Weights, small_batch_linear

AdapterDelta = Callable[[jax.Array], jax.Array]
"""The addition of adapters to the product of one linear, computed from its input: [..., K] -> [..., N]."""


class LowRankStack(NamedTuple):
    """The low-rank updates of one linear, one per adapter slot: y += (x a^T) b^T.

    Attributes:
      a: [S, R, K], zeros in an empty slot.
      b: [N, S, R], with the adapter's scale multiplied in.
    """

    a: jax.Array
    b: jax.Array

    def __call__(self, x: jax.Array, adapter_one_hot: jax.Array) -> jax.Array:
        """(x a^T) b^T, with the a and b in the slot of each token's adapter.

        All slots are multiplied, and the products of the other slots are set to zero. The whole batch takes two
        plain products, no matter which adapters its rows use.

        Args:
          x: [..., K].
          adapter_one_hot: [..., S], 1 at the slot of each token's adapter; all 0 without one.
        Returns: [..., N].
        """
        slots, rank, inputs = self.a.shape
        down, up = self.a.reshape(slots * rank, inputs), self.b.reshape(-1, slots * rank)
        reduced = small_batch_linear(x, Weights(down)).reshape(*x.shape[:-1], slots, rank)
        reduced *= adapter_one_hot[..., None].astype(reduced.dtype)
        return small_batch_linear(reduced.reshape(*x.shape[:-1], slots * rank), Weights(up))


class LayerAdapters(NamedTuple):
    """The adapters of one layer, for each of its linears.

    Attributes:
      qkv: of `Attention.qkv`, or of the mixer in its place; the next three are of the same mixer.
      out: of its `out`.
      gate_up: of `Mlp.gate_up`; None in a layer with experts, which take no adapters.
      down: of `Mlp.down`; the same.
      gate: of the gate of its output; None: it has none.
      steps: of `GatedDeltaRule.steps`; None in a layer with attention.
    """

    qkv: LowRankStack
    out: LowRankStack
    gate_up: LowRankStack | None = None
    down: LowRankStack | None = None
    gate: LowRankStack | None = None
    steps: LowRankStack | None = None


class AdapterDeltas(NamedTuple):
    """The additions of the tokens' adapters to the linears of one layer, named as in `LayerAdapters`; None: nothing."""

    qkv: AdapterDelta | None = None
    out: AdapterDelta | None = None
    gate_up: AdapterDelta | None = None
    down: AdapterDelta | None = None
    gate: AdapterDelta | None = None
    steps: AdapterDelta | None = None


NO_DELTAS = AdapterDeltas()
"""A layer without adapters."""
