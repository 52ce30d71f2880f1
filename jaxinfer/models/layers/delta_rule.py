"""The gated delta rule as a layer's mixer."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import DeltaRuleConfig, NormConfig
from jaxinfer.models.layers.attention import AttentionOutput
from jaxinfer.models.layers.forward_context import ForwardContext, TokenRows, pack, unpack
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.low_rank import NO_DELTAS, AdapterDeltas
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels import RecurrentState, gated_delta_rule


class GatedDeltaRule(nnx.Module):
    """The gated delta rule of each group over its own tokens, or over states in slots; [N, D] -> [N, Hv * V].

    Attributes:
      qkv: the projection before the convolution. Its outputs are ordered by key head: its query, its key, its values.
        A shard along key heads is therefore complete in itself, as are those of the others.
      gate: of the output, [Hv * V, D].
      steps: beta and the step of each value head, [2 * Hv, D], in turn.
      out: back to the width of the model.
      conv: float32 [Hk, F, L].
      decay, step_bias: float32 [Hv], `A_log` and `dt_bias` of the paper.
    """

    def __init__(self, embed: int, cfg: DeltaRuleConfig, norm: NormConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg = cfg

        def linear(outputs: int) -> Linear:
            return Linear(embed, outputs, weights, axes=("heads", "embed"), bias=False, rngs=rngs)

        self.qkv = linear(cfg.key_heads * cfg.features)
        self.gate = linear(cfg.outputs)
        self.steps = linear(2 * cfg.value_heads)
        self.out = Linear(cfg.outputs, embed, weights, axes=("embed", "heads"), bias=False, rngs=rngs)
        shape = cfg.key_heads, cfg.features, cfg.conv
        self.conv = nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32), axes=("heads", None, None))
        self.decay, self.step_bias = (
            nnx.Param(jnp.zeros(cfg.value_heads, jnp.float32), axes=("heads",)) for _ in range(2)
        )
        eps = norm.eps if cfg.norm_eps is None else cfg.norm_eps
        self.norm = Norm(cfg.value_dim, dataclasses.replace(norm, eps=eps))

    @jax.named_scope("delta_rule")
    def heads(
        self,
        x: jax.Array,
        norm: Norm | None,
        forward_context: ForwardContext,
        cache: RecurrentState | None = None,
        *,
        deltas: AdapterDeltas = NO_DELTAS,
    ) -> AttentionOutput:
        """Mix the tokens of norm(x), all groups one after the other.

        Args:
          x: [N, D].
          norm: normalises x; None: x is normalised already.
          forward_context: of this pass.
          cache: the states of this layer; None: each row begins with its first token.
          deltas: what adapters add to `qkv`, `gate` and `steps`.
        Returns: the heads of this device, [N, Hv * V], not projected back yet, and the new states.
        """
        groups = forward_context.groups
        qkv, gate, steps = (
            linear.norm_linear(x, norm, adapter_delta=delta)
            for linear, delta in ((self.qkv, deltas.qkv), (self.gate, deltas.gate), (self.steps, deltas.steps))
        )
        beta, step = jnp.moveaxis(steps.astype(jnp.float32).reshape(*steps.shape[:-1], -1, 2), -1, 0)
        decay = -jnp.exp(self.decay[...]) * jax.nn.softplus(step + self.step_bias[...])
        beta = jax.nn.sigmoid(beta) * (2.0 if self.cfg.negative_eigenvalues else 1.0)
        inputs = (unpack(y, groups) for y in (qkv, decay, beta))
        mixed = []
        for group, of_qkv, of_decay, of_beta in zip(groups, *inputs, strict=True):
            output, new = self._mix(of_qkv, of_decay, of_beta, group, cache, speculates=forward_context.speculates)
            cache = None if cache is None else new
            mixed.append(output)
        heads = pack(mixed)
        gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(heads.shape)
        heads = (self.norm(heads) * gate).astype(x.dtype).reshape(*x.shape[:-1], -1)
        return AttentionOutput(heads, cache)

    def _mix(
        self,
        qkv: jax.Array,
        decay: jax.Array,
        beta: jax.Array,
        group: TokenRows,
        cache: RecurrentState | None,
        *,
        speculates: bool,
    ) -> tuple[jax.Array, RecurrentState]:
        """Run the rule over a group's rows: [B, T, Hv, V] and the new states."""
        cfg, slot = self.cfg, group.slot
        qkv = qkv.reshape(*qkv.shape[:2], -1, cfg.features)
        if cache is None:
            shapes = RecurrentState.shapes(
                len(qkv),
                conv=cfg.conv,
                key_heads=qkv.shape[2],  # of this device
                value_heads=decay.shape[2],
                key_dim=cfg.key_dim,
                value_dim=cfg.value_dim,
                dtype=qkv.dtype,
            )
            conv, state = (jnp.zeros(x.shape, x.dtype) for x in (shapes.conv, shapes.state))
            cache = RecurrentState(conv, state)
            slot = jnp.arange(len(qkv))
        assert slot is not None, "states are read by slots"
        options = {"key_dim": cfg.key_dim, "speculates": speculates}
        return gated_delta_rule(qkv, decay, beta, self.conv[...], cache, slot, group.positions, **options)
