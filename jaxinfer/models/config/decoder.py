"""Decoder-only language models."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

from jaxinfer.models.config.attention import AttentionConfig, QKNormScope
from jaxinfer.models.config.checks import MAX_EXPERTS, require_positive
from jaxinfer.models.config.layers import BlockKind, LayerConfig, cycle
from jaxinfer.models.config.mixer import Mixer
from jaxinfer.models.config.mlp import MlpConfig
from jaxinfer.models.config.norm import NormKind
from jaxinfer.models.config.positions import LearnedPositions, PositionsConfig
from jaxinfer.models.config.text import TextModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(TextModelConfig):
    """One decoder-only language model. Hashable, so it can be a static argument of `jax.jit`."""

    pattern: tuple[LayerConfig, ...]  # kinds of layers, cycled over the layers: one kind if all are alike
    learned_positions: LearnedPositions | None = None
    embed_norm: bool = False  # normalise the embeddings (BLOOM)
    embed_scale: float = 1.0  # multiply the embeddings (Gemma: sqrt(embed))
    word_embed: int | None = None  # width of the embeddings and the head, projected to and from embed (OPT-350m)
    layer_inputs: int | None = None  # width of what each layer takes of a second table, by token (Gemma 4)
    final_norm: bool = True  # normalise after the last layer
    tied: bool = False  # the output projection is the embedding table
    head_bias: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # multiply the logits (Cohere)
    residual_scale: float = 1.0  # multiply what attention and MLP add; in sequential blocks (Granite)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern:
            raise ValueError("DecoderConfig.pattern must hold at least one kind of layer, got ().")
        for kind in self.pattern:
            self._check_kind(kind)
        if self.shares_kv:
            _ = self.cache_places  # which checks that there is a layer to share with
        experts = sum(moe.router.experts for layer in range(self.layers) if (moe := self.layer(layer).mlp.moe))
        if experts > MAX_EXPERTS:
            raise ValueError(f"DecoderConfig has {experts} experts; models of at most {MAX_EXPERTS} are known.")
        if self.word_embed is not None:
            require_positive(self, "word_embed")
        if self.layer_inputs is not None:
            require_positive(self, "layer_inputs")
            if self.word_embed is not None or self.norm.kind is not NormKind.RMS:
                raise ValueError("DecoderConfig.layer_inputs needs word_embed=None and NormConfig.kind=rms.")
        if self.tied and self.head_bias:
            raise ValueError("DecoderConfig.head_bias needs an untied head (tied=False).")

    def _check_kind(self, kind: LayerConfig) -> None:
        scope = kind.attention.qk_norm_scope if kind.has_attention else QKNormScope.HEAD
        if scope is QKNormScope.ALL_HEADS and self.norm.kind is not NormKind.RMS:
            raise ValueError(f"AttentionConfig.qk_norm_scope={scope} needs NormConfig.kind=rms, got {self.norm.kind}.")
        if self.layer_inputs is not None and (kind.mlp.moe is not None or kind.block.is_parallel):
            raise ValueError("DecoderConfig.layer_inputs is not implemented with experts or parallel blocks.")
        if self.residual_scale != 1.0 and kind.block is not BlockKind.SEQUENTIAL:
            raise ValueError(f"DecoderConfig.residual_scale={self.residual_scale} needs sequential blocks.")

    def layer(self, index: int) -> LayerConfig:
        return self.pattern[index % len(self.pattern)]

    def map_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> Self:
        return dataclasses.replace(self, pattern=tuple(map(change, self.pattern)))

    def with_attention(self, **changes: object) -> Self:
        """Copy the config, with some fields of the attention of every layer changed."""
        return self.map_layers(lambda kind: kind.with_attention(**changes))

    def with_mlp(self, **changes: object) -> Self:
        """Copy the config, with some fields of the MLP of every layer changed."""
        return self.map_layers(lambda kind: kind.with_mlp(**changes))

    def with_block(self, block: BlockKind) -> Self:
        """Copy the config, with layers that join the residual stream in this way."""
        return self.map_layers(lambda kind: dataclasses.replace(kind, block=block))

    def vary[T](self, change: Callable[[LayerConfig, T], LayerConfig], values: Sequence[T]) -> Self:
        """Copy the config, with each layer changed by its value; values are cycled over layers."""
        kinds = [change(self.layer(layer), values[layer % len(values)]) for layer in range(self.layers)]
        return dataclasses.replace(self, pattern=cycle(kinds))

    def with_windows(self, windows: Sequence[int | None]) -> Self:
        """Copy the config, with these attention windows, cycled over layers."""
        return self.vary(lambda kind, window: kind.with_attention(window=window), windows)

    def with_positions(self, positions: Sequence[PositionsConfig]) -> Self:
        """Copy the config, with these positions in attention, cycled over layers."""
        return self.vary(lambda kind, of_layer: kind.with_attention(positions=of_layer), positions)

    def with_mlps(self, mlps: Sequence[MlpConfig]) -> Self:
        """Copy the config, with these MLPs, cycled over layers."""
        return self.vary(lambda kind, mlp: dataclasses.replace(kind, mlp=mlp), mlps)

    def with_layers(self, layers: Sequence[int]) -> Self:
        """Return the config of a model that has these layers of this one, in this order; one may come several times."""
        return dataclasses.replace(self, layers=len(layers), pattern=tuple(map(self.layer, layers)))

    @property
    def positions(self) -> tuple[PositionsConfig, ...]:
        """The positions that the attention of layers goes by, each once."""
        return tuple(dict.fromkeys(kind.positions for kind in self.pattern))

    @property
    def shares_kv(self) -> bool:
        """Whether some layers use the keys and values of others."""
        return any(kind.has_attention and kind.attention.shares_kv for kind in self.pattern)

    @property
    def cache_places(self) -> tuple[int, ...]:
        """For each layer the place of its cache in the list of caches: layers that share keys and values have one.

        Raises ValueError for a layer that shares with none.
        """
        places, owners, count = list[int](), dict[Mixer, int](), 0
        for layer in range(self.layers):
            mixer = self.layer(layer).mixer
            if isinstance(mixer, AttentionConfig) and mixer.shares_kv:
                owner = dataclasses.replace(mixer, shares_kv=False)
                if owner not in owners:
                    raise ValueError(
                        f"AttentionConfig.shares_kv of layer {layer}: no layer before it has attention that is alike, "
                        "with keys and values of its own."
                    )
                places.append(owners[owner])
                continue
            owners[mixer] = count
            places.append(count)
            count += 1
        return tuple(places)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers that have a cache, by its place: all but those that use another layer's."""
        places = self.cache_places
        return tuple(places.index(place) for place in range(max(places) + 1))

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that have a recurrent state, in place of keys and values."""
        return tuple(layer for layer in range(self.layers) if not self.layer(layer).has_attention)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.layers) if self.layer(layer).mlp.moe is not None)

    def for_context(self, context: int) -> Self:
        """The config in an engine whose requests have at most so many tokens; weights and caches are as here."""

        def change(kind: LayerConfig) -> LayerConfig:
            has = kind.has_attention
            return dataclasses.replace(kind, mixer=kind.attention.for_context(context)) if has else kind

        return self.map_layers(change)

    @property
    def output_width(self) -> int:
        return self.embed if self.word_embed is None else self.word_embed
