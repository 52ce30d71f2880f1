"""The feed-forward block."""

import jax
from flax import nnx

from jaxinfer.models.config import MlpConfig
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.low_rank import AdapterDelta
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat


class Mlp(nnx.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated; [N, D] -> [N, D].

    A layer calls `hidden`, and `down` in the form that its residual needs.

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

    def hidden(self, x: jax.Array, norm: Norm | None, *, adapter_delta: AdapterDelta | None = None) -> jax.Array:
        """act(up(norm(x))), or act(gate(norm(x))) * up(norm(x)): [N, D] -> [N, F].

        Args:
          x: [N, D].
          norm: normalises x; None: x is normalised already.
          adapter_delta: what adapters add to `gate_up`.
        """
        cfg = self.cfg
        return self.gate_up.norm_linear(
            x, norm, activation=cfg.activation, gated=cfg.gated, adapter_delta=adapter_delta
        )
