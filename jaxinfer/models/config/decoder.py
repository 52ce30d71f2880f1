"""Decoder-only language models."""

import dataclasses
from collections.abc import Sequence

from jaxinfer.models.config.attention import QKNormScope
from jaxinfer.models.config.checks import MAX_EXPERTS, require_positive
from jaxinfer.models.config.layers import BlockKind
from jaxinfer.models.config.mlp import MlpConfig
from jaxinfer.models.config.norm import NormKind
from jaxinfer.models.config.positions import PositionKind, PositionsConfig
from jaxinfer.models.config.text import TextModelConfig

_BY_LAYER = {PositionKind.ROTARY, PositionKind.NONE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(TextModelConfig):
    """One decoder-only language model. Hashable, so it can be a static argument of `jax.jit`."""

    block: BlockKind = BlockKind.SEQUENTIAL
    layer_positions: tuple[PositionsConfig, ...] = ()  # rotary or none, cycled over layers; empty: `positions` in all
    layer_mlps: tuple[MlpConfig, ...] = ()  # cycled over layers; empty: `mlp` in all
    embed_norm: bool = False  # normalise the embeddings (BLOOM)
    embed_scale: float = 1.0  # multiply the embeddings (Gemma: sqrt(embed))
    word_embed: int | None = None  # width of the embeddings and the head, projected to and from embed (OPT-350m)
    final_norm: bool = True  # normalise after the last layer
    tied: bool = False  # the output projection is the embedding table
    head_bias: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # multiply the logits (Cohere)
    residual_scale: float = 1.0  # multiply what attention and MLP add; in sequential blocks (Granite)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_positions and {p.kind for p in (self.positions, *self.layer_positions)} - _BY_LAYER:
            raise ValueError(
                "DecoderConfig.layer_positions may be rotary or none, like positions then; got "
                f"{sorted({str(p.kind) for p in (self.positions, *self.layer_positions)})}."
            )
        scope = self.attention.qk_norm_scope
        if scope is QKNormScope.ALL_HEADS and self.norm.kind is not NormKind.RMS:
            raise ValueError(f"AttentionConfig.qk_norm_scope={scope} needs NormConfig.kind=rms, got {self.norm.kind}.")
        experts = sum(moe.router.experts for layer in range(self.layers) if (moe := self.mlp_in(layer).moe) is not None)
        if experts > MAX_EXPERTS:
            raise ValueError(f"DecoderConfig has {experts} experts; models of at most {MAX_EXPERTS} are known.")
        if self.moe_layers and self.block in (BlockKind.PARALLEL, BlockKind.PARALLEL_TWO_NORMS):
            raise ValueError(f"DecoderConfig.block={self.block} is not implemented with experts; use sequential.")
        if self.residual_scale != 1.0 and self.block is not BlockKind.SEQUENTIAL:
            raise ValueError(f"DecoderConfig.residual_scale={self.residual_scale} needs sequential blocks.")
        if self.word_embed is not None:
            require_positive(self, "word_embed")
        if self.tied and self.head_bias:
            raise ValueError("DecoderConfig.head_bias needs an untied head (tied=False).")

    def _computed_by(self, layer: int) -> tuple[object, ...]:
        return *super()._computed_by(layer), self.positions_in(layer)

    def positions_in(self, layer: int) -> PositionsConfig:
        return self.layer_positions[layer % len(self.layer_positions)] if self.layer_positions else self.positions

    def mlp_in(self, layer: int) -> MlpConfig:
        return self.layer_mlps[layer % len(self.layer_mlps)] if self.layer_mlps else self.mlp

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.layers) if self.mlp_in(layer).moe is not None)

    def with_layers(self, layers: Sequence[int]) -> "DecoderConfig":
        """Return the config of a model that has these layers of this one, in this order; one may come several times."""
        return dataclasses.replace(
            self,
            layers=len(layers),
            attention=dataclasses.replace(self.attention, windows=tuple(self.attention.window(x) for x in layers)),
            layer_positions=tuple(self.positions_in(x) for x in layers) if self.layer_positions else (),
            layer_mlps=tuple(self.mlp_in(x) for x in layers) if self.layer_mlps else (),
        )

    def for_context(self, context: int) -> "DecoderConfig":
        """The config in an engine whose requests have at most so many tokens; weights and caches are as here."""
        return dataclasses.replace(
            self,
            positions=self.positions.for_context(context),
            layer_positions=tuple(positions.for_context(context) for positions in self.layer_positions),
        )

    @property
    def output_width(self) -> int:
        return self.embed if self.word_embed is None else self.word_embed
