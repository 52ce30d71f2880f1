"""The feed-forward block."""

import jax
from flax import nnx

from jaxinfer.models.config import MlpConfig
from jaxinfer.models.layers.forward_context import ForwardContext
from jaxinfer.models.layers.linear import Linear, PartialSum
from jaxinfer.models.layers.low_rank import LayerAdapters
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat


class Mlp(nnx.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated; [N, D] -> [N, D].

    Attributes:
      gate_up: gate and up in one matrix, their outputs alternating, so that a tile of a fused kernel and a shard of a
        mesh have both outputs of each pair. An MLP that is not gated has the up projection alone here.
      down: back to the width of the model.
    """

    def __init__(self, embed: int, cfg: MlpConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg = cfg
        outputs = 2 * cfg.hidden if cfg.gated else cfg.hidden
        self.gate_up = Linear(embed, outputs, weights, axes=("mlp", "embed"), bias=cfg.bias, rngs=rngs)
        self.down = Linear(cfg.hidden, embed, weights, axes=("embed", "mlp"), bias=cfg.bias, rngs=rngs)

    @jax.named_scope("mlp")
    def __call__(
        self,
        x: jax.Array,
        forward_context: ForwardContext,
        adapters: LayerAdapters | None = None,
        *,
        norm: Norm | None = None,
        residual: jax.Array | PartialSum | None = None,
    ) -> jax.Array:
        """residual + mlp(norm(x)). residual: as in `Linear`."""
        gate_up = down = None
        if adapters is not None:
            gate_up = forward_context.adapter_delta(adapters.gate_up)
            down = forward_context.adapter_delta(adapters.down)
        hidden = self.gate_up(x, norm=norm, activation=self.cfg.activation, gated=self.cfg.gated, adapter_delta=gate_up)
        return self.down(hidden, residual=residual, adapter_delta=down)
