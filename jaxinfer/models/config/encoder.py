"""Bidirectional encoders of text."""

import dataclasses
import enum
from typing import ClassVar

from jaxinfer.models.config.checks import require_positive
from jaxinfer.models.config.layers import BlockKind, UniformConfig
from jaxinfer.models.config.positions import LearnedPositions
from jaxinfer.models.config.text import TextModelConfig


class DenseActivation(enum.StrEnum):
    """The nonlinearity of a dense layer behind the pooling."""

    TANH = "tanh"
    GELU = "gelu"  # exact, with erf
    RELU = "relu"
    SILU = "silu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """One dense layer behind an encoder's pooling (sentence-transformers' `Dense`)."""

    outputs: int
    activation: DenseActivation | None = None  # None: linear
    bias: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "outputs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(UniformConfig, TextModelConfig):
    """One bidirectional encoder in BERT's arrangement (post-norm, learned positions)."""

    block: ClassVar[BlockKind] = BlockKind.POST_NORM  # the only one an encoder has
    learned_positions: LearnedPositions
    token_types: int = 0  # rows of the segment table; 0: none (DistilBERT)
    dense: tuple[DenseConfig, ...] = ()  # between pooling and normalisation

    @property
    def output_width(self) -> int:
        """The width of a text's vector."""
        return self.dense[-1].outputs if self.dense else self.embed
