"""Grouped-query attention."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.models.config import AttentionConfig, NormConfig, NormKind, PositionKind, QKNormScope
from jaxinfer.models.layers.forward_context import Cache, ForwardContext, RowKeys, TokenRows, pack, unpack
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.layers.low_rank import NO_DELTAS, AdapterDeltas
from jaxinfer.models.layers.norm import Norm, normalize_heads
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels import KVPages, attention, cached_attention, normalize, paged_attention, split_heads
from jaxinfer.pallas_kernels.rotary import rotate
from jaxinfer.sharding.collectives import local_part, local_start, psum


class AttentionOutput(NamedTuple):
    """The result of attention, or of another mixer.

    Attributes:
      heads: of this device, [N, Hq * K], not projected back yet.
      cache: with the tokens' keys and values written, or their states. Without one, of attention its keys and values;
        of other mixers None.
    """

    heads: jax.Array
    cache: Cache | None


class Attention(nnx.Module):
    """Attention of each group over its own tokens, or over a paged cache; [N, D] -> [N, D].

    A layer calls `heads`, and `out` in the form that its residual needs.

    Attributes:
      qkv: the fused projection. Its outputs are ordered by KV head: the queries of its group, its key, its value.
        A shard along KV heads is therefore complete in itself. A layer that shares keys and values has queries alone,
        and one whose keys are its values has no values.
      out: back to the width of the model.
      gate: the projection of the output gate, whose outputs are ordered as those of the heads; None: there is none.
    """

    def __init__(
        self,
        embed: int,
        cfg: AttentionConfig,
        norm: NormConfig,
        weights: WeightFormat,
        *,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.causal, self.norm_eps = cfg, causal, norm.eps
        self.slopes = cfg.slopes if cfg.positions.kind is PositionKind.ALIBI else None
        qkv, width = cfg.kv_heads * (cfg.group + cfg.kv_parts) * cfg.head_dim, cfg.q_heads * cfg.head_dim
        self.qkv = Linear(embed, qkv, weights, axes=("heads", "embed"), bias=cfg.qkv_bias, rngs=rngs)
        self.out = Linear(width, embed, weights, axes=("embed", "heads"), bias=cfg.out_bias, rngs=rngs)
        gates = width if cfg.output_gate else 0
        self.gate = Linear(embed, gates, weights, axes=("heads", "embed"), bias=False, rngs=rngs) if gates else None
        shared = cfg.qk_norm_scope is QKNormScope.HEAD
        sizes, axis = ((1, 1), "norm") if shared else ((cfg.q_heads, cfg.kv_heads), "heads")
        self.q_norm, self.k_norm = (
            Norm(heads * cfg.head_dim, norm, axis=axis) if has else None
            for heads, has in zip(sizes, (cfg.qk_norm, cfg.qk_norm and not cfg.shares_kv), strict=True)
        )
        self.fuses_norms = shared and norm.kind is NormKind.RMS and not cfg.qk_norm_after_rope
        """Whether the attention operations normalise queries and keys themselves."""

    @jax.named_scope("attention")
    def heads(
        self,
        x: jax.Array,
        norm: Norm | None,
        forward_context: ForwardContext,
        cache: KVPages | RowKeys | None = None,
        *,
        deltas: AdapterDeltas = NO_DELTAS,
    ) -> AttentionOutput:
        """Attend from norm(x), all groups one after the other.

        Args:
          x: [N, D].
          norm: normalises x; None: x is normalised already.
          forward_context: of this pass.
          cache: of this layer; None: each row attends to itself alone. Of a layer that shares keys and values, the
            cache that the other layer returned.
          deltas: what adapters add to `qkv` and `gate`.
        """
        qkv, groups = self.qkv.norm_linear(x, norm, adapter_delta=deltas.qkv), forward_context.groups
        heads = []
        tables = forward_context.rotary.get(self.cfg.positions, (None,) * len(groups))
        if not self.cfg.shares_kv and (self.cfg.keys_are_values or self.cfg.value_norm):
            qkv = self._with_values(qkv)
        if not self.cfg.qk_norm_after_rope:
            qkv = self._with_norms(qkv)
        for group, rotary, part in zip(groups, tables, unpack(qkv, groups), strict=True):
            if self.cfg.shares_kv:
                heads.append(self._attend_to_shared(part, group, rotary, cache, forward_context))
                continue
            part, rotary = self._prepared(part, group.positions, rotary)
            if not isinstance(cache, KVPages):
                mixed, cache = self._attend_within_rows(part, group.positions, rotary, forward_context)
            else:
                assert group.page_table is not None, "a cache is read by a page table"
                options = {"rotary": rotary, **self._head_options, **self._score_options}
                mixed, cache = cached_attention(part, cache, group.page_table, group.positions, **options)
                if len(groups) > 1:
                    # Else the next group's write is not known to come after this one's reads: XLA copies the cache.
                    mixed, cache = lax.optimization_barrier((mixed, cache))
            heads.append(mixed)
        mixed = pack(heads)
        if self.gate is not None:
            gate = self.gate.norm_linear(x, norm, adapter_delta=deltas.gate)
            gate = jax.nn.sigmoid(gate.astype(jnp.float32))
            mixed = (mixed * gate).astype(mixed.dtype)
        return AttentionOutput(mixed, cache)

    def _attend_within_rows(
        self,
        qkv: jax.Array,
        positions: jax.Array,
        rotary: tuple[jax.Array, jax.Array] | None,
        forward_context: ForwardContext,
    ) -> tuple[jax.Array, RowKeys]:
        """Attend from each row of a group to itself: heads [B, T, Hq * K], and their keys and values."""
        cfg = self.cfg
        kv_heads = qkv.shape[-1] // ((cfg.group + 2) * cfg.head_dim)
        q, k, v = split_heads(qkv, kv_heads=kv_heads, head_dim=cfg.head_dim, rotary=rotary, **self._head_options)
        return self._attend(q, RowKeys(k, v), positions, forward_context), RowKeys(k, v)

    def _attend(self, q: jax.Array, rows: RowKeys, positions: jax.Array, forward_context: ForwardContext) -> jax.Array:
        """Attend from queries [B, T, Hq, K] to the keys and values of their rows: [B, T, Hq * K]."""
        key_sizes, options = forward_context.key_sizes, self._score_options
        lengths = jnp.sum(positions >= 0, axis=1) if key_sizes is None and forward_context.padded else None
        heads = attention(q, *rows, positions, lengths, key_sizes=key_sizes, causal=self.causal, **options)
        return heads.reshape(*positions.shape, -1)

    def _attend_to_shared(
        self,
        q: jax.Array,
        group: TokenRows,
        rotary: tuple[jax.Array, jax.Array] | None,
        cache: KVPages | RowKeys | None,
        forward_context: ForwardContext,
    ) -> jax.Array:
        """Attend from a group's queries to keys and values that another layer has written in this pass."""
        assert cache is not None, "a layer before this one has written keys and values"
        positions = group.positions
        q = q.reshape(*positions.shape, -1, self.cfg.head_dim)
        q = q if self.q_norm is None else self.q_norm(q)
        q = q if rotary is None else rotate(q, rotary)
        if isinstance(cache, RowKeys):
            return self._attend(q, cache, positions, forward_context)
        assert group.page_table is not None, "a cache is read by a page table"
        mixed = paged_attention(q, cache, group.page_table, positions, **self._score_options)
        return mixed.reshape(*positions.shape, -1)

    def _with_norms(self, qkv: jax.Array) -> jax.Array:
        """Normalise the queries and keys of a projection, unless the attention operations do it themselves."""
        if self.q_norm is None or self.k_norm is None or self.fuses_norms:
            return qkv
        cfg, norms = self.cfg, (self.q_norm, self.k_norm)
        real = cfg.real_q_heads or cfg.q_heads, cfg.real_kv_heads or cfg.kv_heads
        return self._with_heads(qkv, lambda q, k: normalize_heads((q, k), norms, cfg.qk_norm_scope, heads=real))

    def _with_values(self, qkv: jax.Array) -> jax.Array:
        """Make values of the keys if a projection has none, and normalise them if the config says so."""
        cfg = self.cfg
        heads = qkv.reshape(*qkv.shape[:-1], -1, cfg.group + cfg.kv_parts, cfg.head_dim)
        qk, v = heads[..., : cfg.group + 1, :], heads[..., -1:, :]
        if cfg.value_norm:
            v = normalize(v, jnp.ones((), jnp.float32), None, eps=self.norm_eps)
        return jnp.concatenate((qk, v), axis=-2).reshape(*qkv.shape[:-1], -1)

    def _prepared(
        self, qkv: jax.Array, positions: jax.Array, rotary: tuple[jax.Array, jax.Array] | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Do to a group's queries and keys what the attention operations do not; return the rotation left to them."""
        if (temperature := self.cfg.query_temperature) is not None:
            periods = jnp.floor(jnp.maximum(positions, 0) / temperature.original_context)
            factor = (1.0 + temperature.beta * jnp.log1p(periods))[..., None, None, None]
            qkv = self._with_heads(qkv, lambda q, k: ((q * factor).astype(q.dtype), k))
        if not self.cfg.qk_norm_after_rope:
            return qkv, rotary
        if rotary is not None:
            cos, sin = (table[..., None, :] for table in rotary)
            qkv = self._with_heads(qkv, lambda q, k: (rotate(q, (cos, sin)), rotate(k, (cos, sin))))
        return self._with_norms(qkv), None

    def _with_heads(self, qkv: jax.Array, change: Callable[[jax.Array, jax.Array], Sequence[jax.Array]]) -> jax.Array:
        """Change the queries [..., Hkv, G, K] and the keys [..., Hkv, 1, K] of a projection."""
        heads = qkv.reshape(*qkv.shape[:-1], -1, self.cfg.group + 2, self.cfg.head_dim)
        q, k, v = jnp.split(heads, (self.cfg.group, self.cfg.group + 1), axis=-2)
        return jnp.concatenate((*change(q, k), v), axis=-2).reshape(qkv.shape)

    @property
    def _head_options(self) -> dict[str, Any]:
        """Options of `pallas_kernels` for query and key heads before the rotation."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None and self.fuses_norms:
            norms = self.q_norm.scale[...], self.k_norm.scale[...]
        return {"norms": norms, "norm_eps": self.norm_eps}

    @property
    def _score_options(self) -> dict[str, Any]:
        """Options of `pallas_kernels` for the scores, with the ALiBi slopes of this device's heads."""
        slopes = None if self.slopes is None else local_part(jnp.asarray(self.slopes, jnp.float32), "heads")
        cfg = self.cfg
        return {"alibi": slopes, "scale": cfg.score_scale, "window": cfg.window, "softcap": cfg.softcap}

    def mean_key(self, keys: jax.Array) -> jax.Array:
        """Average the keys of all heads, which are alike where tokens are (ToMe, arXiv:2210.09461, section 3).

        Args:
          keys: of this device's heads, [B, T, Hkv, K].
        Returns: [B, T, K] in their dtype, equal on every device.
        """
        heads = local_start("heads", keys.shape[2]) + jnp.arange(keys.shape[2])
        real = self.cfg.kv_heads if self.cfg.real_kv_heads is None else self.cfg.real_kv_heads
        # A head that is copied counts as often as every other: each has as many copies.
        exact = jnp.where((heads < real)[:, None], keys.astype(jnp.float32), 0.0)
        return (psum(jnp.sum(exact, axis=2), "heads") / real).astype(keys.dtype)
