"""The decoder-only language model, one for all families."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.config import BlockKind, DecoderConfig, PositionKind
from jaxinfer.models.layers import Attention, Embedding, KVPages, Linear, Mlp, Norm, Step, WeightFormat, rotary_table


class DecoderLayer(nnx.Module):
    """Attention and MLP around the residual stream; see `BlockKind` for the arrangements."""

    def __init__(self, cfg: DecoderConfig, index: int, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.block = cfg.block
        self.attention_norm = Norm(cfg.embed, cfg.norm)
        self.attention = Attention(
            cfg.embed, cfg.attention, cfg.positions, cfg.norm, weights, window=cfg.window(index), rngs=rngs
        )
        self.mlp_norm = None if cfg.block is BlockKind.PARALLEL else Norm(cfg.embed, cfg.norm)
        self.mlp = Mlp(cfg.embed, cfg.mlp, weights, rngs=rngs)
        sandwich = cfg.block is BlockKind.SANDWICH
        self.attention_post_norm = Norm(cfg.embed, cfg.norm) if sandwich else None
        self.mlp_post_norm = Norm(cfg.embed, cfg.norm) if sandwich else None

    def __call__(self, x: jax.Array, step: Step, cache: KVPages | None) -> tuple[jax.Array, KVPages | None]:
        normed = self.attention_norm(x)
        attended, cache = self.attention(normed, step, cache)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        if self.mlp_norm is None:
            return x + attended + self.mlp(normed), cache
        if self.block is BlockKind.PARALLEL_TWO_NORMS:
            return x + attended + self.mlp(self.mlp_norm(x)), cache
        x = x + attended
        hidden = self.mlp(self.mlp_norm(x))
        if self.mlp_post_norm is not None:
            hidden = self.mlp_post_norm(hidden)
        return x + hidden, cache


class Decoder(nnx.Module):
    """Token ids to hidden vectors, through every layer, with or without a paged cache."""

    def __init__(self, cfg: DecoderConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg, self.dtype = cfg, weights.dtype
        self.embed = Embedding(cfg.vocab, cfg.embed, weights, axes=("vocab", "embed"), rngs=rngs)
        table = WeightFormat(dtype=weights.dtype)  # added, not multiplied: never int8
        self.positions = (
            Embedding(cfg.context + cfg.positions.offset, cfg.embed, table, axes=("positions", "embed"), rngs=rngs)
            if cfg.positions.kind is PositionKind.LEARNED
            else None
        )
        self.embed_norm = Norm(cfg.embed, cfg.norm) if cfg.embed_norm else None
        self.layers = nnx.List([DecoderLayer(cfg, i, weights, rngs=rngs) for i in range(cfg.layers)])
        self.final_norm = Norm(cfg.embed, cfg.norm)
        self.head = (
            None
            if cfg.tied
            else Linear(cfg.embed, cfg.vocab, weights, axes=("vocab", "embed"), bias=cfg.head_bias, rngs=rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        caches: list[KVPages] | None = None,
        page_table: jax.Array | None = None,
    ) -> tuple[jax.Array, list[KVPages] | None]:
        """Hidden vectors after the last norm, and the caches with this step's keys and values in them.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T], each token's place in its request, negative for padding.
          caches: one KVPages per layer, or None to attend to the given tokens alone.
          page_table: int32 [B, P], the pages of each row, in order; P * page_size bounds what is read.
        Returns: [B, T, D], and the new caches (None without caches).
        """
        cfg = self.cfg
        x = self.embed(tokens)
        if cfg.embed_scale != 1.0:
            x *= np.asarray(cfg.embed_scale, x.dtype)
        rotary = None
        if self.positions is not None:
            x += self.positions(jnp.maximum(positions, 0) + cfg.positions.offset)
        elif cfg.positions.kind is PositionKind.ROTARY:
            rotary = rotary_table(cfg.positions, positions)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        step = Step(positions, rotary, page_table)
        new_caches = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layers.{index}"):
                x, cache = layer(x, step, None if caches is None else caches[index])
            new_caches.append(cache)
        return self.final_norm(x), None if caches is None else new_caches

    @jax.named_scope("logits")
    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of every next token, float32: [..., D] -> [..., V]."""
        scores = self.embed.project(hidden) if self.head is None else self.head(hidden)
        scores = scores.astype(jnp.float32)
        if (cap := self.cfg.logit_softcap) is not None:
            scores = cap * jnp.tanh(scores / cap)
        return scores
