"""The feed-forward block as a mixture of experts (DeepSpeed Inference, section V)."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import MlpConfig, MoeConfig, RouterConfig, SharedMix
from jaxinfer.models.layers.linear import Stack
from jaxinfer.models.layers.mlp import Mlp
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.moe import Routing, expert_mlp, top_k_gating


def _float32_product(x: jax.Array, weight: nnx.Param) -> jax.Array:
    """x W^T in float32 whatever x is: [N, D], [M, D] -> [N, M]. A rounded score may choose another expert."""
    return jnp.einsum("nd,md->nm", x.astype(jnp.float32), weight[...], precision="highest")


def _float32_matrix(outputs: int, embed: int, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), (outputs, embed), jnp.float32), axes=(None, "embed"))


class Router(nnx.Module):
    """The choice of each token's experts, in float32 in every format.

    Attributes:
      weight: float32 [E, D].
      selection_bias: float32 [E], or None.
    """

    def __init__(self, embed: int, cfg: RouterConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.weight = _float32_matrix(cfg.experts, embed, rngs)
        bias = nnx.Param(jnp.zeros(cfg.experts, jnp.float32), axes=(None,))
        self.selection_bias = bias if cfg.selection_bias else None

    @jax.named_scope("router")
    def __call__(self, x: jax.Array, valid: jax.Array | None) -> Routing:
        """Route tokens: [N, D] -> tables of N tokens. valid: bool [N], which are no padding; None: all."""
        cfg = self.cfg
        return top_k_gating(
            _float32_product(x, self.weight),
            cfg.experts_per_token,
            valid=valid,
            capacity=cfg.capacity(len(x)),
            normalize=cfg.normalize,
            scoring=cfg.kind.value,
            selection_bias=None if self.selection_bias is None else self.selection_bias[...],
            groups=cfg.groups,
            groups_per_token=cfg.groups_per_token,
            group_score=cfg.group_score.value,
            scale=cfg.scale,
        )


class Experts(nnx.Module):
    """E MLPs of the same sizes.

    Attributes:
      gate_up: as `Mlp.gate_up`, of each expert: [E, 2F, D], or [E, F, D] if they are not gated.
      down: [E, D, F].
    """

    def __init__(self, embed: int, cfg: MlpConfig, count: int, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg = cfg
        outputs = 2 * cfg.hidden if cfg.gated else cfg.hidden
        self.gate_up = Stack(count, embed, outputs, weights, axes=("mlp", "embed"), bias=cfg.bias, rngs=rngs)
        self.down = Stack(count, cfg.hidden, embed, weights, axes=("embed", "mlp"), bias=cfg.bias, rngs=rngs)

    @jax.named_scope("experts")
    def __call__(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Sum each token's experts by their weights: [N, D] -> [N, D]."""
        return expert_mlp(
            x,
            routing,
            self.gate_up.weights,
            self.down.weights,
            self.gate_up.biases,
            self.down.biases,
            activation=self.cfg.activation.value,
            gated=self.cfg.gated,
        )


class Moe(nnx.Module):
    """A few experts for each token, and perhaps an MLP that all tokens go through; [N, D] -> [N, D].

    A layer calls the whole, or where experts come and go while it runs (`streaming`) first `router`, then `combine`
    with what the experts gave.

    Attributes:
      router: chooses the experts.
      experts: all of them.
      shared: the MLP of all tokens, or None.
      shared_gate: float32 [1, D] if its output is gated, [2, D] if both are weighted, else None.
    """

    def __init__(self, embed: int, cfg: MlpConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        assert cfg.moe is not None
        self.cfg: MoeConfig = cfg.moe
        self.router = Router(embed, cfg.moe.router, rngs=rngs)
        self.experts = Experts(embed, cfg, cfg.moe.router.experts, weights, rngs=rngs)
        self.shared = None if cfg.shared is None else Mlp(embed, cfg.shared, weights, rngs=rngs)
        gates = cfg.moe.shared_mix.gates
        self.shared_gate = SharedGate(embed, gates, rngs=rngs) if gates else None

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """Run router, experts and the shared MLP.

        Args:
          x: [..., D], normalised.
          valid: bool [...], which tokens are no padding, whose experts are computed; None: all.
        Returns: [..., D], and the choices of the N tokens.
        """
        rows = x.reshape(-1, x.shape[-1])
        routing = self.router(rows, None if valid is None else valid.reshape(-1))
        return self.combine(rows, self.experts(rows, routing)).reshape(x.shape), routing

    @jax.named_scope("shared")
    def combine(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Add the shared MLP of x, [N, D], to what the experts gave, [N, D]."""
        if self.shared is None:
            return y
        hidden = self.shared.hidden(x, None)
        if self.shared_gate is None:
            return self.shared.down.linear_residual(hidden, y)
        shared, gates = self.shared.down(hidden), self.shared_gate(x)
        if self.cfg.shared_mix is SharedMix.GATED:
            mixed = y + jax.nn.sigmoid(gates) * shared
        else:
            of_experts, of_shared = jnp.split(jax.nn.softmax(gates), 2, axis=-1)
            mixed = of_experts * y + of_shared * shared
        return mixed.astype(y.dtype)


class SharedGate(nnx.Module):
    """The weights that the shared MLP is added by, before sigmoid or softmax.

    Attributes:
      weight: float32 [gates, D].
    """

    def __init__(self, embed: int, gates: int, *, rngs: nnx.Rngs):
        self.weight = _float32_matrix(gates, embed, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, D] -> float32 [N, gates]."""
        return _float32_product(x, self.weight)
