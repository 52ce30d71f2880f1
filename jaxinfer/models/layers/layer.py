"""One layer: attention and MLP, joined to the residual stream as the config's `BlockKind` says."""

import functools

import jax
from flax import nnx

from jaxinfer.models.config import BlockKind, TransformerConfig, ViTConfig
from jaxinfer.models.layers.attention import Attended, Attention
from jaxinfer.models.layers.forward_context import ForwardContext
from jaxinfer.models.layers.low_rank import LayerAdapters
from jaxinfer.models.layers.mlp import Mlp
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels import KVPages
from jaxinfer.sharding.collectives import mesh_axes


class TransformerLayer(nnx.Module):
    """One layer of a decoder, an encoder or a vision transformer.

    Attributes:
      attention_norm: before attention; in a post-norm block after it.
      mlp_norm: before the MLP; in a post-norm block after it. A parallel block does not have it.
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
        self.attention_norm = Norm(cfg.embed, cfg.norm)
        self.attention = Attention(
            cfg.embed, cfg.attention, cfg.positions, cfg.norm, weights, layer=layer, causal=causal, rngs=rngs
        )
        if self.block is not BlockKind.PARALLEL:
            self.mlp_norm = Norm(cfg.embed, cfg.norm)
        self.mlp = Mlp(cfg.embed, cfg.mlp, weights, rngs=rngs)
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
        if self.block not in (BlockKind.PARALLEL, BlockKind.PARALLEL_TWO_NORMS):
            x, cache, _ = self.attend(x, forward_context, cache, adapters)
            return self.feed_forward(x, forward_context, adapters), cache
        # x += attention(norm1(x)) + mlp(norm2(x))
        mlp_norm = self.attention_norm if self.block is BlockKind.PARALLEL else self.mlp_norm
        one_sum = mesh_axes("heads") and mesh_axes("heads") == mesh_axes("mlp")  # over the devices serves both
        attend = self.attention.partial_sum if one_sum else self.attention
        y, cache, *_ = attend(x, forward_context, cache, adapters, norm=self.attention_norm, residual=x)
        return self.mlp(x, forward_context, adapters, norm=mlp_norm, residual=y), cache

    def attend(
        self,
        x: jax.Array,
        forward_context: ForwardContext,
        cache: KVPages | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Attended:
        """The first half of a layer that is not parallel: [N, D] -> [N, D]."""
        attend = functools.partial(self.attention, forward_context=forward_context, cache=cache, adapters=adapters)
        match self.block:
            case BlockKind.SANDWICH:  # x += norm(attention(norm(x)))
                attended = attend(x, norm=self.attention_norm)
                return attended._replace(x=x + self.attention_post_norm(attended.x))
            case BlockKind.POST_NORM:  # x = norm(x + attention(x))
                attended = attend(x, residual=x)
                return attended._replace(x=self.attention_norm(attended.x))
            case _:  # x += attention(norm(x))
                return attend(x, norm=self.attention_norm, residual=x)

    def feed_forward(
        self, x: jax.Array, forward_context: ForwardContext, adapters: LayerAdapters | None = None
    ) -> jax.Array:
        """The second half: [N, D] -> [N, D]."""
        mlp = functools.partial(self.mlp, forward_context=forward_context, adapters=adapters)
        match self.block:
            case BlockKind.SANDWICH:  # x += norm(mlp(norm(x)))
                return x + self.mlp_post_norm(mlp(x, norm=self.mlp_norm))
            case BlockKind.POST_NORM:  # x = norm(x + mlp(x))
                return self.mlp_norm(mlp(x, residual=x))
            case _:  # x += mlp(norm(x))
                return mlp(x, norm=self.mlp_norm, residual=x)
