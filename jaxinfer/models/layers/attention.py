"""Grouped-query attention."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.models.config import AttentionConfig, NormConfig, PositionKind, PositionsConfig
from jaxinfer.models.layers.forward_context import ForwardContext, TokenRows, pack, unpack
from jaxinfer.models.layers.linear import Linear, PartialSum
from jaxinfer.models.layers.low_rank import LayerAdapters
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels import KVPages, attention, cached_attention, split_heads
from jaxinfer.sharding.collectives import local_part, local_start, psum


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
      x: [N, D]; heads that are not projected back yet, [..., Hq * K].
      cache: with the tokens' keys and values written; None if there is none.
      keys: of a single group without a cache, those of this device's heads, [B, T, Hkv, K].
    """

    x: jax.Array
    cache: KVPages | None
    keys: jax.Array | None


class Attention(nnx.Module):
    """Attention of each group over its own tokens, or over a paged cache; [N, D] -> [N, D].

    Attributes:
      qkv: the fused projection. Its outputs are ordered by KV head: the queries of its group, its key, its value.
        A shard along KV heads is therefore complete in itself.
      out: back to the width of the model.
    """

    def __init__(
        self,
        embed: int,
        cfg: AttentionConfig,
        positions: PositionsConfig,
        norm: NormConfig,
        weights: WeightFormat,
        *,
        layer: int,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.causal, self.norm_eps = cfg, causal, norm.eps
        self.scale, self.window = cfg.score_scale(layer), cfg.window(layer)
        self.slopes = cfg.slopes if positions.kind is PositionKind.ALIBI else None
        qkv, width = cfg.kv_heads * (cfg.group + 2) * cfg.head_dim, cfg.q_heads * cfg.head_dim
        self.qkv = Linear(embed, qkv, weights, axes=("heads", "embed"), bias=cfg.qkv_bias, rngs=rngs)
        self.out = Linear(width, embed, weights, axes=("embed", "heads"), bias=cfg.out_bias, rngs=rngs)
        self.q_norm = Norm(cfg.head_dim, norm) if cfg.qk_norm else None
        self.k_norm = Norm(cfg.head_dim, norm) if cfg.qk_norm else None

    @jax.named_scope("attention")
    def __call__(
        self,
        x: jax.Array,
        forward_context: ForwardContext,
        cache: KVPages | None = None,
        adapters: LayerAdapters | None = None,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
    ) -> Attended:
        """residual + attention(norm(x))."""
        heads, cache, keys = self._heads(x, forward_context, cache, adapters, norm)
        out_delta = None if adapters is None else forward_context.adapter_delta(adapters.out)
        return Attended(self.out(heads, residual=residual, adapter_delta=out_delta), cache, keys)

    @jax.named_scope("attention")
    def partial_sum(
        self,
        x: jax.Array,
        forward_context: ForwardContext,
        cache: KVPages | None = None,
        adapters: LayerAdapters | None = None,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
    ) -> tuple[PartialSum, KVPages | None]:
        """The same, as `Linear.partial_sum`, where the heads are split."""
        heads, cache, _ = self._heads(x, forward_context, cache, adapters, norm)
        out_delta = None if adapters is None else forward_context.adapter_delta(adapters.out)
        return self.out.partial_sum(heads, residual=residual, adapter_delta=out_delta), cache

    def _heads(
        self,
        x: jax.Array,
        forward_context: ForwardContext,
        cache: KVPages | None,
        adapters: LayerAdapters | None,
        norm: Norm | None,
    ) -> Attended:
        """This device's heads of all groups, [N, Hq * K], before they are projected back."""
        qkv_delta = None if adapters is None else forward_context.adapter_delta(adapters.qkv)
        qkv = self.qkv(x, norm=norm, adapter_delta=qkv_delta)
        groups, heads, keys = forward_context.groups, [], None
        for group, rotary, part in zip(groups, forward_context.rotary, unpack(qkv, groups), strict=True):
            mixed, cache, keys = self._attend(group, rotary, part, cache, forward_context)
            if cache is not None and len(groups) > 1:
                # Without it the next group's write is not known to come after this one's reads: XLA copies the cache.
                mixed, cache = lax.optimization_barrier((mixed, cache))
            heads.append(mixed)
        return Attended(pack(heads), cache, keys)

    def _attend(
        self,
        group: TokenRows,
        rotary: tuple[jax.Array, jax.Array] | None,
        qkv: jax.Array,
        cache: KVPages | None,
        forward_context: ForwardContext,
    ) -> Attended:
        """This device's heads of one group, [B, T, Hq * K], over its pages or, without a cache, over its own tokens."""
        cfg, positions = self.cfg, group.positions
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.scale[...], self.k_norm.scale[...])
        preparation: dict[str, Any] = {"rotary": rotary, "norms": norms, "norm_eps": self.norm_eps}
        slopes = None if self.slopes is None else local_part(jnp.asarray(self.slopes, jnp.float32), "heads")
        options: dict[str, Any] = {
            "alibi": slopes,
            "scale": self.scale,
            "window": self.window,
            "softcap": cfg.softcap,
        }
        if cache is not None:
            assert group.page_table is not None
            return Attended(
                *cached_attention(qkv, cache, group.page_table, positions, **preparation, **options), keys=None
            )
        kv_heads = qkv.shape[-1] // ((cfg.group + 2) * cfg.head_dim)
        q, k, v = split_heads(qkv, kv_heads=kv_heads, head_dim=cfg.head_dim, **preparation)
        key_sizes = forward_context.key_sizes
        lengths = jnp.sum(positions >= 0, axis=1) if key_sizes is None and forward_context.padded else None
        heads = attention(q, k, v, positions, lengths, key_sizes=key_sizes, causal=self.causal, **options)
        return Attended(heads.reshape(*positions.shape, -1), None, k)

    def mean_key(self, keys: jax.Array) -> jax.Array:
        """The mean of all heads' keys, alike where tokens are (ToMe, arXiv:2210.09461, section 3).

        keys: of this device's heads, [B, T, Hkv, K]. Returns [B, T, K] in their dtype, the same on every device.
        """
        heads = local_start("heads", keys.shape[2]) + jnp.arange(keys.shape[2])
        real = self.cfg.kv_heads if self.cfg.real_kv_heads is None else self.cfg.real_kv_heads
        # A head that is copied counts as often as every other: each has as many copies.
        exact = jnp.where((heads < real)[:, None], keys.astype(jnp.float32), 0.0)
        return (psum(jnp.sum(exact, axis=2), "heads") / real).astype(keys.dtype)
