"""The feed-forward block."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import Activation, MlpConfig
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.low_rank import AdapterDelta
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat


def xielu(x: jax.Array, factors: jax.Array) -> jax.Array:
    """xIELU (arXiv:2411.13010, section 3.2), in float32: a x^2 + x / 2 above 0, else b (e^x - 1 - x) + x / 2.

    factors: a and b, float32 [2].
    """
    y = x.astype(jnp.float32)
    below = factors[1] * (jnp.expm1(jnp.minimum(y, 0.0)) - y)
    return (jnp.where(y > 0.0, factors[0] * y * y, below) + 0.5 * y).astype(x.dtype)


class Mlp(nnx.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated; [N, D] -> [N, D].

    A layer calls `hidden`, and `down` in the form that its residual needs.

    Attributes:
      gate_up: gate and up in one matrix, their outputs alternating, so that a tile of a fused kernel and a shard of a
        mesh have both outputs of each pair. An MLP that is not gated has the up projection alone here.
      down: back to the width of the model.
      xielu: float32 [2], the factors of xIELU above and below 0; None for other activations.
    """

    def __init__(self, embed: int, cfg: MlpConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg = cfg
        outputs = 2 * cfg.hidden if cfg.gated else cfg.hidden
        self.gate_up = Linear(embed, outputs, weights, axes=("mlp", "embed"), bias=cfg.bias, rngs=rngs)
        self.down = Linear(cfg.hidden, embed, weights, axes=("embed", "mlp"), bias=cfg.bias, rngs=rngs)
        learned = cfg.activation is Activation.XIELU
        self.xielu = nnx.Param(jnp.full(2, 0.8, jnp.float32), axes=(None,)) if learned else None

    def hidden(self, x: jax.Array, norm: Norm | None, *, adapter_delta: AdapterDelta | None = None) -> jax.Array:
        """act(up(norm(x))), or act(gate(norm(x))) * up(norm(x)): [N, D] -> [N, F].

        Args:
          x: [N, D].
          norm: normalises x; None: x is normalised already.
          adapter_delta: what adapters add to `gate_up`.
        """
        cfg = self.cfg
        if self.xielu is not None:
            return xielu(self.gate_up.norm_linear(x, norm, adapter_delta=adapter_delta), self.xielu[...])
        return self.gate_up.norm_linear(
            x, norm, activation=cfg.activation, gated=cfg.gated, adapter_delta=adapter_delta
        )
