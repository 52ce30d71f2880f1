"""The layers of a model, whatever its tokens are made of."""

import dataclasses
import enum

from jaxinfer.models.config.attention import AttentionConfig
from jaxinfer.models.config.checks import require_layers, require_positive
from jaxinfer.models.config.mlp import MlpConfig
from jaxinfer.models.config.norm import NormConfig


class BlockKind(enum.StrEnum):
    """How attention and MLP are joined to the residual stream in one layer."""

    SEQUENTIAL = "sequential"  # x += attention(norm(x)); x += mlp(norm(x))
    PARALLEL = "parallel"  # x += attention(n) + mlp(n), with one n = norm(x) (GPT-J)
    PARALLEL_TWO_NORMS = "parallel_two_norms"  # x += attention(norm1(x)) + mlp(norm2(x)) (GPT-NeoX)
    SANDWICH = "sandwich"  # x += norm(attention(norm(x))); x += norm(mlp(norm(x))) (Gemma 2)
    REORDERED = "reordered"  # x += norm(attention(x)); x += norm(mlp(x)) (OLMo 2, arXiv:2501.00656, section 3.2)
    POST_NORM = "post_norm"  # x = norm(x + attention(x)); x = norm(x + mlp(x)) (BERT, OPT-350m)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """The layers, whatever their tokens are made of."""

    embed: int
    layers: int
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig

    def __post_init__(self) -> None:
        require_positive(self, "embed", "layers")
        require_layers(self, self.layers)

    def mlp_in(self, layer: int) -> MlpConfig:
        """The MLP of one layer."""
        return self.mlp

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """For each layer the first one that computes the same with other weights."""
        first: dict[tuple[object, ...], int] = {}
        return tuple(first.setdefault(self._computed_by(layer), layer) for layer in range(self.layers))

    def _computed_by(self, layer: int) -> tuple[object, ...]:
        """All that layers may differ in besides their weights."""
        return self.attention.score_scale(layer), self.attention.window(layer), self.mlp_in(layer)
