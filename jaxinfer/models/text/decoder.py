"""The decoder-only language model, one for all families."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers.forward_context import Cache, ForwardContext, TokenRows, pack, unpack
from jaxinfer.models.layers.layer import TransformerLayer
from jaxinfer.models.layers.layer_inputs import LayerInputs
from jaxinfer.models.layers.linear import Embedding, Linear
from jaxinfer.models.layers.low_rank import LayerAdapters
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.moe import Routing
from jaxinfer.sharding.collectives import local_start


class Decoder(nnx.Module):
    """Token ids to hidden vectors, through every layer, with or without a paged cache.

    Widths: D inside the layers; W of the embeddings, of the hidden vectors that leave, and of the head. W is D unless
    the config has `word_embed`.

    Attributes:
      project_in: embeddings to the layers, [..., W] -> [..., D]; None where W is D.
      layer_inputs: the vectors of a second table that layers take; None: they take none.
      project_out: hidden vectors after the last norm, [..., D] -> [..., W]; the same.
    """

    def __init__(self, cfg: DecoderConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg, self.dtype = cfg, weights.dtype

        def linear(inputs: int, outputs: int, axes: tuple[str, str], *, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, weights, axes=axes, bias=bias, rngs=rngs)

        projected = cfg.word_embed is not None
        width, axis = cfg.output_width, "word_embed" if projected else "embed"
        self.embed = Embedding(cfg.vocab_rows, width, weights, axes=("vocab", axis), rngs=rngs)
        self.project_in = linear(width, cfg.embed, ("embed", axis)) if projected else None
        table = WeightFormat(dtype=weights.dtype)  # added, not multiplied: never int8
        self.positions = (
            None
            if (learned := cfg.learned_positions) is None
            else Embedding(cfg.context + learned.offset, cfg.embed, table, axes=("positions", "embed"), rngs=rngs)
        )
        self.layer_inputs = None if cfg.layer_inputs is None else LayerInputs(cfg, weights, rngs=rngs)
        self.embed_norm = Norm(cfg.embed, cfg.norm) if cfg.embed_norm else None
        self.layers = nnx.List([TransformerLayer(cfg, weights, layer=i, rngs=rngs) for i in range(cfg.layers)])
        self.final_norm = Norm(cfg.embed, cfg.norm) if cfg.final_norm else None
        self.project_out = linear(cfg.embed, width, (axis, "embed")) if projected else None
        self.head = None if cfg.tied else linear(width, cfg.vocab_rows, ("vocab", axis), bias=cfg.head_bias)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        caches: list[Cache] | None = None,
        page_table: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Cache] | None]:
        """Run `forward` for rows, whose slots are their numbers: hidden vectors [B, T, W], and the new caches."""
        slot = None if caches is None else jnp.arange(len(tokens))
        (hidden,), caches = self.forward((TokenRows(tokens, positions, page_table, slot=slot),), caches)
        return hidden, caches

    def forward(
        self,
        groups: tuple[TokenRows, ...],
        caches: list[Cache] | None = None,
        adapters: list[LayerAdapters] | None = None,
        routings: list[Routing] | None = None,
        *,
        speculates: bool = False,
    ) -> tuple[list[jax.Array], list[Cache] | None]:
        """Pass through the whole model: `enter`, `run_layers`, `leave`.

        All groups go through the matrices together; attention runs group by group.

        Args:
          groups: rows of tokens.
          caches: of all layers (`DecoderConfig.cached_layers`), or None to let each row attend to itself alone.
          adapters: one LayerAdapters per layer, or None.
          routings: a list to which the choices of each layer with experts are added; or None.
          speculates: as in `ForwardContext`.
        Returns: what `leave` returns, hidden vectors [B, T, W] of each group, and the caches with this pass's keys
          and values written (None without caches).
        """
        x, forward_context = self.enter(groups, adapters)
        forward_context = forward_context._replace(routings=routings, speculates=speculates)
        x, caches = self.run_layers(x, forward_context, caches, adapters)
        return self.leave(x, forward_context), caches

    def enter(
        self, groups: tuple[TokenRows, ...], adapters: list[LayerAdapters] | None = None
    ) -> tuple[jax.Array, ForwardContext]:
        """The embeddings of the packed tokens, [N, D], and what all layers share; arguments as for `forward`."""
        cfg = self.cfg
        any_adapters = None if adapters is None else adapters[0]
        forward_context = ForwardContext.from_groups(groups, cfg.positions, any_adapters)
        ids = pack(group.ids for group in groups)
        x = self.embed(ids)
        if cfg.embed_scale != 1.0:
            x *= np.asarray(cfg.embed_scale, x.dtype)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None and cfg.learned_positions is not None:
            positions = pack(group.positions for group in groups)
            x += self.positions(jnp.maximum(positions, 0) + cfg.learned_positions.offset)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.layer_inputs is not None:
            parts = unpack(self.layer_inputs(ids, x), groups)
            groups = tuple(group._replace(layer_inputs=part) for group, part in zip(groups, parts, strict=True))
            forward_context = forward_context._replace(groups=groups)
        return x, forward_context

    def run_layers(
        self,
        x: jax.Array,
        forward_context: ForwardContext,
        caches: list[Cache] | None = None,
        adapters: list[LayerAdapters] | None = None,
        *,
        first: int = 0,
        last: int | None = None,
        number: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Cache] | None]:
        """Run layers `first` to `last`, both included (None: the last of the model).

        Args:
          x: [N, D].
          forward_context: of this pass, from `enter` or `ForwardContext.from_groups`.
          caches: those that these layers use, each once and in the order of the first use, or None.
          adapters: one LayerAdapters for each of these layers, or None.
          number: int32 [], that of the first layer, where a program runs others than those whose names it has; None:
            they are those.
        Returns: [N, D], and the new caches (None without caches).
        """
        indices = range(first, len(self.layers) if last is None else last + 1)
        places = self.cfg.cache_places[indices.start : indices.stop]
        used = dict(zip(dict.fromkeys(places), caches or [None] * len({*places}), strict=True))
        adapters_by_layer = [None] * len(indices) if adapters is None else adapters
        for index, place, layer_adapters in zip(indices, places, adapters_by_layer, strict=True):
            context = forward_context.of_layer(index if number is None else number + (index - first))
            with jax.named_scope(f"layers.{index}"):
                x, used[place] = self.layers[index](x, context, used[place], layer_adapters)
        return x, None if caches is None else [cache for cache in used.values() if cache is not None]

    def leave(self, x: jax.Array, forward_context: ForwardContext) -> list[jax.Array]:
        """Run the last norm and projection: [N, D] -> hidden vectors, [B, T, W] of each group."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        return unpack(x, forward_context.groups)

    @jax.named_scope("logits")
    def logits(self, hidden: jax.Array) -> jax.Array:
        """Score every next token on this device, float32: [..., W] -> [..., V]; -inf in rows that are no tokens."""
        scores = self.embed.project(hidden) if self.head is None else self.head(hidden)
        scores = scores.astype(jnp.float32)
        if self.cfg.logit_scale != 1.0:
            scores *= self.cfg.logit_scale
        if (cap := self.cfg.logit_softcap) is not None:
            scores = cap * jnp.tanh(scores / cap)
        if self.cfg.vocab_rows > self.cfg.vocab:
            ids = local_start("vocab", scores.shape[-1]) + jnp.arange(scores.shape[-1])
            scores = jnp.where(ids < self.cfg.vocab, scores, -jnp.inf)
        return scores
