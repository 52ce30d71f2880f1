"""The feed-forward block as a mixture of experts (DeepSpeed Inference, section V)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import MlpConfig, MoeConfig, NormConfig, RouterConfig, SharedMix
from jaxinfer.models.layers.expert_exchange import run_experts
from jaxinfer.models.layers.linear import PartialSum, Stack
from jaxinfer.models.layers.mlp import Mlp
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.moe import Routing, expert_mlp, top_k_gating
from jaxinfer.sharding.collectives import axis_index, axis_size, mesh_axes


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
      expert_scale: float32 [E], or None.
    """

    def __init__(self, embed: int, cfg: RouterConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.weight = _float32_matrix(cfg.experts, embed, rngs)
        bias = nnx.Param(jnp.zeros(cfg.experts, jnp.float32), axes=(None,))
        self.selection_bias = bias if cfg.selection_bias else None
        self.expert_scale = nnx.Param(jnp.ones(cfg.experts, jnp.float32), axes=(None,)) if cfg.expert_scale else None

    @jax.named_scope("router")
    def __call__(self, x: jax.Array, valid: jax.Array | None) -> Routing:
        """Route tokens: [N, D] -> tables of N tokens. valid: bool [N], which are no padding; None: all."""
        cfg = self.cfg
        routing = top_k_gating(
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
        if self.expert_scale is None:
            return routing
        return routing._replace(weights=routing.weights * self.expert_scale[...][routing.experts])


class Experts(nnx.Module):
    """E MLPs of the same sizes.

    Attributes:
      gate_up: as `Mlp.gate_up`, of each expert: [E, 2F, D], or [E, F, D] if they are not gated.
      down: [E, D, F].
    """

    def __init__(self, embed: int, cfg: MlpConfig, count: int, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg = cfg
        outputs = 2 * cfg.hidden if cfg.gated else cfg.hidden
        self.gate_up = Stack(count, embed, outputs, weights, axes=("expert_mlp", "embed"), bias=cfg.bias, rngs=rngs)
        self.down = Stack(count, cfg.hidden, embed, weights, axes=("embed", "expert_mlp"), bias=cfg.bias, rngs=rngs)

    @jax.named_scope("experts")
    def __call__(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Sum those of each token's experts that this device has, by their weights: [N, D] -> [N, D].

        Where the hidden width is split, of each what its part of it gives.
        """
        bias = self.down.biases
        if bias is not None and axis_size("expert_mlp") > 1:
            bias = jnp.where(axis_index("expert_mlp") == 0, bias, 0.0)  # one of the parts adds it
        return expert_mlp(
            x,
            routing,
            self.gate_up.weights,
            self.down.weights,
            self.gate_up.biases,
            bias,
            activation=self.cfg.activation.value,
            gated=self.cfg.gated,
        )


class Moe(nnx.Module):
    """A few experts for each token, and perhaps an MLP that all tokens go through; [N, D] -> [N, D].

    A layer calls the whole, or where experts come and go while it runs (`streaming`) first `router` and
    `before_experts`, then `combine` with what the experts gave.

    Attributes:
      router: chooses the experts.
      experts: all of them.
      shared: the MLP of all tokens, or None.
      shared_gate: float32 [1, D] if its output is gated, [2, D] if both are weighted, else None.
      norms: of both, where each is normalised, else None.
    """

    def __init__(self, embed: int, cfg: MlpConfig, norm: NormConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        assert cfg.moe is not None
        self.cfg: MoeConfig = cfg.moe
        self.router = Router(embed, cfg.moe.router, rngs=rngs)
        self.experts = Experts(embed, cfg, cfg.moe.router.experts, weights, rngs=rngs)
        self.shared = None if cfg.shared is None else Mlp(embed, cfg.shared, weights, rngs=rngs)
        gates = cfg.moe.shared_mix.gates
        self.shared_gate = SharedGate(embed, gates, rngs=rngs) if gates else None
        self.norms = BranchNorms(embed, norm) if cfg.moe.shared_mix is SharedMix.NORMALIZED else None

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """Run router, experts and the shared MLP.

        Args:
          x: [..., D], normalised.
          valid: bool [...], which tokens are no padding, whose experts are computed; None: all.
        Returns: [..., D], and the choices of the N tokens.
        """
        rows = x.reshape(-1, x.shape[-1])
        routing = self.router(rows, None if valid is None else valid.reshape(-1))
        y = run_experts(self.before_experts(rows), routing, self.experts, self.cfg.router.capacity(len(rows)))
        return self.combine(rows, y).reshape(x.shape), routing

    def before_experts(self, x: jax.Array) -> jax.Array:
        """Normalise x, [N, D], for the experts if they have a norm of their own."""
        return x if self.norms is None else self.norms.before_experts(x)

    @jax.named_scope("shared")
    def combine(self, x: jax.Array, y: PartialSum) -> jax.Array:
        """Add the shared MLP of x, [N, D], to what the experts gave, [N, D].

        Where devices have parts of both, one sum over the devices adds them up.
        """
        if self.shared is None:
            return y.finish()
        if self.norms is not None:
            shared = self.shared.down(self.shared.hidden(self.norms.before_shared(x), None))
            return self.norms.after_shared(shared) + self.norms.after_experts(y.finish())
        if y.axes != mesh_axes("mlp"):
            y = PartialSum(y.finish(), ())
        hidden, down = self.shared.hidden(x, None), self.shared.down
        if self.shared_gate is None:
            return down.partial_sum(hidden, y).finish() if y.axes else down.linear_residual(hidden, y.part)
        shared, weigh = down.partial_sum(hidden), self._weights(x)
        if y.axes != shared.axes:
            shared = PartialSum(shared.finish(), ())
        once = None if shared.once is None else weigh(jnp.zeros_like(shared.part), shared.once)
        return PartialSum(weigh(y.part, shared.part), y.axes, once).finish()

    def _weights(self, x: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """The weighted sum, by x, of what experts and the shared MLP gave, linear in both; [N, D] each."""
        assert self.shared_gate is not None
        gates = self.shared_gate(x)
        if self.cfg.shared_mix is SharedMix.GATED:
            of_experts, of_shared = 1.0, jax.nn.sigmoid(gates)
        else:
            of_experts, of_shared = jnp.split(jax.nn.softmax(gates), 2, axis=-1)
        return lambda experts, shared: (of_experts * experts + of_shared * shared).astype(experts.dtype)


class BranchNorms(nnx.Module):
    """The norms of experts and of the MLP beside them, before and after: `SharedMix.NORMALIZED`.

    Both take the residual stream after its norm without weights, by weights of their own.

    Attributes:
      before_shared, before_experts: those weights.
      after_shared, after_experts: the norms of what they gave.
    """

    def __init__(self, embed: int, norm: NormConfig):
        self.before_shared, self.before_experts = InputScale(embed), InputScale(embed)
        self.after_shared, self.after_experts = Norm(embed, norm), Norm(embed, norm)


class InputScale(nnx.Module):
    """A number for each feature.

    Attributes:
      scale: float32 [D].
    """

    def __init__(self, embed: int):
        self.scale = nnx.Param(jnp.ones(embed, jnp.float32), axes=("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, D] -> [N, D]."""
        return (x.astype(jnp.float32) * self.scale[...]).astype(x.dtype)


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
