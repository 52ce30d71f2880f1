"""One layer: attention and MLP, joined to the residual stream by the formula of its block (`blocks.py`)."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import BlockKind, DecoderConfig, DeltaRuleConfig, TransformerConfig, ViTConfig
from jaxinfer.models.layers.attention import Attention, AttentionOutput
from jaxinfer.models.layers.blocks import Branch, PlainOutput, Product, make_branch, parallel
from jaxinfer.models.layers.delta_rule import GatedDeltaRule
from jaxinfer.models.layers.forward_context import Cache, ForwardContext
from jaxinfer.models.layers.layer_inputs import LayerInput
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.low_rank import NO_DELTAS, AdapterDeltas, LayerAdapters
from jaxinfer.models.layers.mlp import Mlp
from jaxinfer.models.layers.moe import Moe
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat


class MixerModule(Protocol):
    """The mixer of a layer: attention, or a module in its place."""

    out: Linear

    def heads(
        self,
        x: jax.Array,
        norm: Norm | None,
        forward_context: ForwardContext,
        cache: Any = None,
        *,
        deltas: AdapterDeltas = NO_DELTAS,
    ) -> AttentionOutput:
        """Mix the tokens of norm(x), [N, D]; the output is not projected back yet."""
        ...


class TransformerLayer(nnx.Module):
    """One layer of a decoder, an encoder or a vision transformer.

    Attributes:
      attention: attention; None in a layer with another mixer.
      delta_rule: the gated delta rule; None in a layer with another mixer.
      mlp: an MLP, or a mixture of experts.
      attention_norm: before attention; in a post-norm or reordered block after it.
      mlp_norm: before the MLP; in a post-norm or reordered block after it. None in a parallel block of one norm.
      attention_post_norm: after attention in a sandwich block, else None.
      mlp_post_norm: after the MLP in a sandwich block, else None.
      input: the way of the layer's vectors of a second table to the stream; None: it takes none.
      output_scale: float32 [1], which multiplies the stream at the end; None: nothing does.
    """

    def __init__(
        self,
        cfg: TransformerConfig | ViTConfig,
        weights: WeightFormat,
        *,
        layer: int,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        kind = cfg.layer(layer)
        self.block = kind.block
        self.residual_scale = cfg.residual_scale if isinstance(cfg, DecoderConfig) else 1.0
        has_post_norms = self.block is BlockKind.SANDWICH
        self.attention_norm = Norm(cfg.embed, cfg.norm)
        self.attention = (
            Attention(cfg.embed, kind.attention, cfg.norm, weights, causal=causal, rngs=rngs)
            if kind.has_attention
            else None
        )
        self.delta_rule = (
            GatedDeltaRule(cfg.embed, kind.mixer, cfg.norm, weights, rngs=rngs)
            if isinstance(kind.mixer, DeltaRuleConfig)
            else None
        )
        self.mlp_norm = None if self.block is BlockKind.PARALLEL else Norm(cfg.embed, cfg.norm)
        self.mlp = (
            Mlp(cfg.embed, kind.mlp, weights, rngs=rngs)
            if kind.mlp.moe is None
            else Moe(cfg.embed, kind.mlp, cfg.norm, weights, rngs=rngs)
        )
        self.attention_post_norm = Norm(cfg.embed, cfg.norm) if has_post_norms else None
        self.mlp_post_norm = Norm(cfg.embed, cfg.norm) if has_post_norms else None
        self.input = (
            LayerInput(cfg, kind.mlp.activation, weights, rngs=rngs)
            if isinstance(cfg, DecoderConfig) and cfg.layer_inputs is not None
            else None
        )
        self.output_scale = nnx.Param(jnp.ones(1, jnp.float32), axes=("norm",)) if kind.output_scale else None

    def __call__(
        self,
        x: jax.Array,
        forward_context: ForwardContext,
        cache: Cache | None = None,
        adapters: LayerAdapters | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """[N, D] -> [N, D], and the cache as in `AttentionOutput`."""
        deltas = forward_context.adapter_deltas(adapters)
        heads, cache = self.mixer.heads(x, self.norm_before_attention, forward_context, cache, deltas=deltas)
        if self.block.is_parallel:
            attention = Product(self.mixer.out, heads, deltas.out)
            y = parallel(x, attention, lambda: self._mlp(x, self.mlp_norm or self.attention_norm, deltas))
        else:
            x = self.add_attention(x, heads, deltas)
            y = self.add_experts(x, forward_context) if isinstance(self.mlp, Moe) else self.add_mlp(x, deltas)
        return self.finish(y, forward_context.layer_input), cache

    @property
    def mixer(self) -> MixerModule:
        """The part of the layer in which tokens see one another."""
        mixer = self.attention if self.delta_rule is None else self.delta_rule
        assert mixer is not None
        return mixer

    @property
    def norm_before_attention(self) -> Norm | None:
        """The norm of what attention takes; post-norm and reordered blocks have none there."""
        return self._attention_branch.norm

    @property
    def _attention_branch(self) -> Branch:
        return make_branch(self.block, self.attention_norm, self.attention_post_norm, self.residual_scale)

    @property
    def _mlp_branch(self) -> Branch:
        assert self.mlp_norm is not None, "a block that is not parallel has one"
        return make_branch(self.block, self.mlp_norm, self.mlp_post_norm, self.residual_scale)

    @jax.named_scope("attention")
    def add_attention(self, x: jax.Array, heads: jax.Array, deltas: AdapterDeltas = NO_DELTAS) -> jax.Array:
        """Add attention to the residual stream in a block that is not parallel.

        Args:
          x: the stream, [N, D].
          heads: of attention from x, or from its norm: what `Attention.heads` gives.
          deltas: of this layer's adapters.
        Returns: [N, D].
        """
        return self._attention_branch.join(x, Product(self.mixer.out, heads, deltas.out))

    @jax.named_scope("mlp")
    def add_mlp(self, x: jax.Array, deltas: AdapterDeltas = NO_DELTAS) -> jax.Array:
        """Add the MLP to the residual stream in a block that is not parallel: [N, D] -> [N, D]."""
        branch = self._mlp_branch
        return branch.join(x, self._mlp(x, branch.norm, deltas))

    @jax.named_scope("moe")
    def add_experts(self, x: jax.Array, forward_context: ForwardContext) -> jax.Array:
        """Add the mixture of experts to the residual stream: [N, D] -> [N, D]."""
        assert isinstance(self.mlp, Moe)
        y, routing = self.mlp(self.before_mlp(x), forward_context.valid)
        if forward_context.routings is not None:
            forward_context.routings.append(routing)
        return self.join_mlp(x, y)

    def before_mlp(self, x: jax.Array) -> jax.Array:
        """Return what the MLP takes of the residual stream: [N, D] -> [N, D]."""
        norm = self._mlp_branch.norm
        return x if norm is None else norm(x)

    def join_mlp(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Join what an MLP gave, [N, D], to the residual stream."""
        return self._mlp_branch.join(x, PlainOutput(y))

    def finish(self, x: jax.Array, vectors: jax.Array | None = None) -> jax.Array:
        """Do to the stream what comes after the MLP: [N, D] -> [N, D].

        vectors: those of the layer, of a second table, [N, P].
        """
        if self.input is not None:
            assert vectors is not None, "the model has a second table"
            x = self.input(x, vectors)
        if self.output_scale is not None:
            x = (x.astype(jnp.float32) * self.output_scale[...]).astype(x.dtype)
        return x

    def _mlp(self, x: jax.Array, norm: Norm | None, deltas: AdapterDeltas) -> Product:
        """The output of the MLP from the stream's norm; None: from the stream."""
        assert isinstance(self.mlp, Mlp)
        hidden = self.mlp.hidden(x, norm, adapter_delta=deltas.gate_up)
        return Product(self.mlp.down, hidden, deltas.down)
