"""The decoder-only language model, one for all families."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.config import DecoderConfig, PositionKind
from jaxinfer.models.forward_context import ForwardContext, TokenRows, pack, unpack
from jaxinfer.models.layer import TransformerLayer
from jaxinfer.models.linear import Embedding, Linear, WeightFormat
from jaxinfer.models.low_rank import LayerAdapters
from jaxinfer.models.norm import Norm
from jaxinfer.models.rotary import rotary_table
from pallas_kernels import KVPages


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
        self.layers = nnx.List(
            [TransformerLayer(cfg, weights, window=cfg.window(i), rngs=rngs) for i in range(cfg.layers)]
        )
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
        """`forward` for a single group of rows: hidden vectors [B, T, D], and the new caches."""
        (hidden,), caches = self.forward((TokenRows(tokens, positions, page_table),), caches)
        return hidden, caches

    def forward(
        self,
        groups: tuple[TokenRows, ...],
        caches: list[KVPages] | None = None,
        adapters: list[LayerAdapters] | None = None,
    ) -> tuple[list[jax.Array], list[KVPages] | None]:
        """Hidden vectors after the last norm, and the caches with this pass's keys and values in them.

        All groups go through the matrices together; attention runs group by group.

        Args:
          groups: rows of tokens. caches: one KVPages per layer, or None to let each row attend to itself alone.
          adapters: one LayerAdapters per layer, or None.
        Returns: [B, T, D] of each group, and the new caches (None without caches).
        """
        cfg, forward_context = self.cfg, self._forward_context(groups, adapters)
        x = self.embed(pack(group.ids for group in groups))
        if cfg.embed_scale != 1.0:
            x *= np.asarray(cfg.embed_scale, x.dtype)
        if self.positions is not None:
            places = pack(group.positions for group in groups)
            x += self.positions(jnp.maximum(places, 0) + cfg.positions.offset)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        new_caches = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layers.{index}"):
                x, cache = layer(
                    x,
                    forward_context,
                    None if caches is None else caches[index],
                    None if adapters is None else adapters[index],
                )
            new_caches.append(cache)
        return unpack(self.final_norm(x), groups), None if caches is None else new_caches

    def _forward_context(self, groups: tuple[TokenRows, ...], adapters: list[LayerAdapters] | None) -> ForwardContext:
        rotated = self.cfg.positions.kind is PositionKind.ROTARY
        rotary = tuple(rotary_table(self.cfg.positions, group.positions) if rotated else None for group in groups)
        if adapters is None:
            return ForwardContext(groups, rotary)
        slots = len(adapters[0].qkv.a)
        return ForwardContext(groups, rotary, pack(_one_hot(group, slots) for group in groups))

    @jax.named_scope("logits")
    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of every next token, float32: [..., D] -> [..., V]."""
        scores = self.embed.project(hidden) if self.head is None else self.head(hidden)
        scores = scores.astype(jnp.float32)
        if (cap := self.cfg.logit_softcap) is not None:
            scores = cap * jnp.tanh(scores / cap)
        return scores


def _one_hot(group: TokenRows, slots: int) -> jax.Array:
    """The adapter of each token: [B, T, S]."""
    assert group.adapter is not None, "a model with adapters is told the adapter of each row"
    return jnp.broadcast_to(jax.nn.one_hot(group.adapter - 1, slots)[:, None], (*group.ids.shape, slots))
