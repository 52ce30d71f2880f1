"""One layer: attention and MLP, joined to the residual stream as the config's `BlockKind` says."""

import jax
from flax import nnx

from jaxinfer.models.config import BlockKind, DecoderConfig, TransformerConfig, ViTConfig
from jaxinfer.models.layers.attention import Attention
from jaxinfer.models.layers.forward_context import ForwardContext
from jaxinfer.models.layers.linear import PartialSum
from jaxinfer.models.layers.low_rank import NO_DELTAS, AdapterDeltas, LayerAdapters
from jaxinfer.models.layers.mlp import Mlp
from jaxinfer.models.layers.moe import Moe
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels import KVPages
from jaxinfer.sharding.collectives import mesh_axes


class TransformerLayer(nnx.Module):
    """One layer of a decoder, an encoder or a vision transformer.

    Attributes:
      mlp: an MLP, or a mixture of experts.
      attention_norm: before attention; in a post-norm or reordered block after it.
      mlp_norm: before the MLP; in a post-norm or reordered block after it. A parallel block does not have it.
      attention_post_norm: after attention; only a sandwich block has it.
      mlp_post_norm: after the MLP; only a sandwich block has it.
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
        self.block = cfg.block
        self.residual_scale = cfg.residual_scale if isinstance(cfg, DecoderConfig) else 1.0
        positions = cfg.positions if isinstance(cfg, ViTConfig) else cfg.positions_in(layer)
        self.attention_norm = Norm(cfg.embed, cfg.norm)
        self.attention = Attention(
            cfg.embed, cfg.attention, positions, cfg.norm, weights, layer=layer, causal=causal, rngs=rngs
        )
        if self.block is not BlockKind.PARALLEL:
            self.mlp_norm = Norm(cfg.embed, cfg.norm)
        mlp = cfg.mlp_in(layer)
        self.mlp = (Mlp if mlp.moe is None else Moe)(cfg.embed, mlp, weights, rngs=rngs)
        if self.block is BlockKind.SANDWICH:
            self.attention_post_norm, self.mlp_post_norm = Norm(cfg.embed, cfg.norm), Norm(cfg.embed, cfg.norm)

    def __call__(
        self,
        x: jax.Array,
        forward_context: ForwardContext,
        cache: KVPages | None = None,
        adapters: LayerAdapters | None = None,
    ) -> tuple[jax.Array, KVPages | None]:
        """[N, D] -> [N, D], and the cache with the tokens' keys and values written."""
        deltas = forward_context.adapter_deltas(adapters)
        heads, cache, _ = self.attention.heads(
            x, self.norm_before_attention, forward_context, cache, adapter_delta=deltas.qkv
        )
        if self.block in (BlockKind.PARALLEL, BlockKind.PARALLEL_TWO_NORMS):
            return self._add_both(x, heads, deltas), cache
        x = self.add_attention(x, heads, deltas)
        if isinstance(self.mlp, Moe):
            return self.add_experts(x, forward_context), cache
        return self.add_mlp(x, deltas), cache

    @property
    def norm_before_attention(self) -> Norm | None:
        """The norm of what attention takes; post-norm and reordered blocks have none there."""
        return None if self.block in (BlockKind.POST_NORM, BlockKind.REORDERED) else self.attention_norm

    @property
    def norm_before_mlp(self) -> Norm | None:
        """The norm of what the MLP takes in a block that is not parallel; the same blocks have none there."""
        return None if self.block in (BlockKind.POST_NORM, BlockKind.REORDERED) else self.mlp_norm

    @jax.named_scope("attention")
    def add_attention(self, x: jax.Array, heads: jax.Array, deltas: AdapterDeltas = NO_DELTAS) -> jax.Array:
        """Add attention to the residual stream in a block that is not parallel.

        Args:
          x: the stream, [N, D].
          heads: of attention from x, or from its norm: what `Attention.heads` gives.
          deltas: of this layer's adapters.
        Returns: [N, D].
        """
        out, delta = self.attention.out, deltas.out
        match self.block:
            case BlockKind.SANDWICH:
                return x + self.attention_post_norm(out(heads, adapter_delta=delta))
            case BlockKind.REORDERED:
                return x + self.attention_norm(out(heads, adapter_delta=delta))
            case BlockKind.POST_NORM:
                return self.attention_norm(out.linear_residual(heads, x, adapter_delta=delta))
            case _ if self.residual_scale != 1.0:
                return x + self.residual_scale * out(heads, adapter_delta=delta)
            case _:
                return out.linear_residual(heads, x, adapter_delta=delta)

    @jax.named_scope("mlp")
    def add_mlp(self, x: jax.Array, deltas: AdapterDeltas = NO_DELTAS) -> jax.Array:
        """Add the MLP to the residual stream in a block that is not parallel: [N, D] -> [N, D]."""
        assert isinstance(self.mlp, Mlp)
        hidden = self.mlp.hidden(x, self.norm_before_mlp, adapter_delta=deltas.gate_up)
        down, delta = self.mlp.down, deltas.down
        if self.block in (BlockKind.SANDWICH, BlockKind.REORDERED) or self.residual_scale != 1.0:
            return self.join_mlp(x, down(hidden, adapter_delta=delta))
        added = down.linear_residual(hidden, x, adapter_delta=delta)
        return self.mlp_norm(added) if self.block is BlockKind.POST_NORM else added

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
        norm = self.norm_before_mlp
        return x if norm is None else norm(x)

    def join_mlp(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Join what an MLP gave, [N, D], to the residual stream."""
        match self.block:
            case BlockKind.SANDWICH:
                return x + self.mlp_post_norm(y)
            case BlockKind.REORDERED:
                return x + self.mlp_norm(y)
            case BlockKind.POST_NORM:
                return self.mlp_norm(x + y)
            case _:
                return x + (y if self.residual_scale == 1.0 else self.residual_scale * y)

    def _add_both(self, x: jax.Array, heads: jax.Array, deltas: AdapterDeltas) -> jax.Array:
        """Add attention and the MLP of a parallel block, which both begin at x; arguments as for `add_attention`.

        Where devices have parts of both, one sum over the devices adds them up.
        """
        one_sum = mesh_axes("heads") and mesh_axes("heads") == mesh_axes("mlp")
        with jax.named_scope("attention"):
            add = self.attention.out.partial_sum if one_sum else self.attention.out.linear_residual
            y = add(heads, x, adapter_delta=deltas.out)
        with jax.named_scope("mlp"):
            assert isinstance(self.mlp, Mlp)
            norm = self.attention_norm if self.block is BlockKind.PARALLEL else self.mlp_norm
            hidden = self.mlp.hidden(x, norm, adapter_delta=deltas.gate_up)
            if isinstance(y, PartialSum):
                return self.mlp.down.partial_sum(hidden, y, adapter_delta=deltas.down).finish()
            return self.mlp.down.linear_residual(hidden, y, adapter_delta=deltas.down)
