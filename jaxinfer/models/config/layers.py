"""The kinds of layers, and the layers of a model, whatever its tokens are made of."""

import abc
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from jaxinfer.models.config.attention import AttentionConfig
from jaxinfer.models.config.checks import require_layers, require_positive
from jaxinfer.models.config.mixer import Mixer
from jaxinfer.models.config.mlp import MlpConfig
from jaxinfer.models.config.norm import NormConfig
from jaxinfer.models.config.positions import NO_POSITIONS, PositionKind, PositionsConfig


class BlockKind(enum.StrEnum):
    """How attention and MLP are joined to the residual stream in one layer."""

    SEQUENTIAL = "sequential"  # x += attention(norm(x)); x += mlp(norm(x))
    PARALLEL = "parallel"  # x += attention(n) + mlp(n), with one n = norm(x) (GPT-J)
    PARALLEL_TWO_NORMS = "parallel_two_norms"  # x += attention(norm1(x)) + mlp(norm2(x)) (GPT-NeoX)
    SANDWICH = "sandwich"  # x += norm(attention(norm(x))); x += norm(mlp(norm(x))) (Gemma 2)
    REORDERED = "reordered"  # x += norm(attention(x)); x += norm(mlp(x)) (OLMo 2, arXiv:2501.00656, section 3.2)
    POST_NORM = "post_norm"  # x = norm(x + attention(x)); x = norm(x + mlp(x)) (BERT, OPT-350m)

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP start from the same x, so that one sum over devices finishes both."""
        return self in (BlockKind.PARALLEL, BlockKind.PARALLEL_TWO_NORMS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One kind of layer: all that layers of a model may differ in, apart from their weights."""

    mixer: Mixer
    mlp: MlpConfig
    block: BlockKind = BlockKind.SEQUENTIAL
    output_scale: bool = False  # multiply the residual stream after the layer by a learned number (Gemma 4)

    def __post_init__(self) -> None:
        if not isinstance(self.mixer, AttentionConfig) and self.block.is_parallel:
            raise ValueError(f"LayerConfig.block={self.block} is not implemented without attention; use sequential.")
        if self.mlp.moe is not None and self.block.is_parallel:
            raise ValueError(f"LayerConfig.block={self.block} is not implemented with experts; use sequential.")

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of a layer that has attention."""
        assert isinstance(self.mixer, AttentionConfig), "a layer without attention"
        return self.mixer

    @property
    def has_attention(self) -> bool:
        """Whether the mixer is attention, which has keys and values in pages."""
        return isinstance(self.mixer, AttentionConfig)

    @property
    def positions(self) -> PositionsConfig:
        """The positions that attention goes by."""
        return self.mixer.positions if isinstance(self.mixer, AttentionConfig) else NO_POSITIONS

    def with_attention(self, **changes: object) -> Self:
        """Copy this kind, with some fields of its attention changed; one without attention stays."""
        if not isinstance(self.mixer, AttentionConfig):
            return self
        return dataclasses.replace(self, mixer=dataclasses.replace(self.mixer, **changes))

    def with_mlp(self, **changes: object) -> Self:
        """Copy this kind, with some fields of its MLP changed."""
        return dataclasses.replace(self, mlp=dataclasses.replace(self.mlp, **changes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersConfig(abc.ABC):
    """The layers, whatever their tokens are made of. Ask `layer` what one of them computes."""

    embed: int
    layers: int
    norm: NormConfig

    def __post_init__(self) -> None:
        require_positive(self, "embed", "layers")
        require_layers(self, self.layers)

    @abc.abstractmethod
    def layer(self, index: int) -> LayerConfig:
        """The kind of one layer."""

    @abc.abstractmethod
    def map_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> Self:
        """Copy the config, with every kind of layer changed."""

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """For each layer the first one that computes the same with other weights."""
        first: dict[LayerConfig, int] = {}
        return tuple(first.setdefault(self.layer(index), index) for index in range(self.layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformConfig(LayersConfig):
    """Layers of one kind, whose tokens all see one another."""

    block: ClassVar[BlockKind]
    attention: AttentionConfig
    mlp: MlpConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp.moe is not None:
            raise ValueError(f"{type(self).__name__}.mlp.moe is not implemented: only decoders have experts.")
        if (window := self.attention.window) is not None:
            raise ValueError(
                f"{type(self).__name__}.attention.window={window} is not implemented: all tokens see each other; use "
                "None."
            )
        if (kind := self.attention.positions.kind) is not PositionKind.NONE:
            raise ValueError(
                f"{type(self).__name__}.attention.positions.kind={kind} is not implemented: positions are learned; "
                "use none."
            )

    def layer(self, index: int) -> LayerConfig:
        return LayerConfig(mixer=self.attention, mlp=self.mlp, block=self.block)

    def map_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> Self:
        kind = change(self.layer(0))
        return dataclasses.replace(self, attention=kind.attention, mlp=kind.mlp)


def cycle[T](values: Sequence[T]) -> tuple[T, ...]:
    """The shortest sequence that gives these values when it is repeated, the last time perhaps in part.

    >>> cycle([4, 4, None, 4, 4, None, 4])
    (4, 4, None)
    """
    lengths = (n for n in range(1, len(values) + 1) if all(value == values[i % n] for i, value in enumerate(values)))
    return tuple(values[: next(lengths)])
