"""Attention: heads, windows, and what is done to queries, keys and scores."""

import dataclasses
import enum

from jaxinfer.models.config.checks import require_positive
from jaxinfer.models.config.mixer import Mixer
from jaxinfer.models.config.positions import NO_POSITIONS, PositionsConfig, alibi_slopes


class QKNormScope(enum.StrEnum):
    """The features that queries and keys are normalised over."""

    HEAD = "head"  # each head by itself, all with the same weights (Qwen3)
    HEAD_OWN_WEIGHTS = "head_own_weights"  # each head by itself, with weights of its own (Command R+)
    ALL_HEADS = "all_heads"  # all query heads together, all key heads together (OLMo 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTemperature:
    """Queries become larger by 1 + beta ln(1 + floor(position / original_context)) (Ministral 3)."""

    beta: float
    original_context: int

    def __post_init__(self) -> None:
        require_positive(self, "original_context")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Mixer):
    """Sizes and options of attention, grouped-query throughout."""

    q_heads: int
    kv_heads: int  # == q_heads: multi-head; 1: multi-query; between: grouped-query
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None  # multiplies the scores; None means head_dim ** -0.5
    softcap: float | None = None  # scores become cap * tanh(scores / cap) (Gemma 2)
    window: int | None = None  # a query sees so many tokens, itself the last; None: all earlier tokens
    positions: PositionsConfig = NO_POSITIONS
    query_temperature: QueryTemperature | None = None
    qk_norm: bool = False  # normalise queries and keys before rotation (Qwen3)
    qk_norm_after_rope: bool = False  # normalise them after it (Hunyuan)
    qk_norm_scope: QKNormScope = QKNormScope.HEAD
    value_norm: bool = False  # divide each value by its root mean square, without weights (Gemma 4)
    keys_are_values: bool = False  # values are the keys as projected: before norms and rotation (Gemma 4)
    shares_kv: bool = False  # take the keys and values of the last layer before that is alike and has its own (Gemma 4)
    output_gate: bool = False  # multiply each feature of the heads by sigmoid(x G), with a matrix G (AFMoE, Qwen3.5)
    alibi: tuple[float, ...] | None = None  # the slope of each query head; None: those of `alibi_slopes`
    real_kv_heads: int | None = None  # those from here on are padding; None: none is
    real_q_heads: int | None = None  # how many are no padding; None: all

    def __post_init__(self) -> None:
        require_positive(self, "q_heads", "kv_heads", "head_dim")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads={self.q_heads} is not a multiple of kv_heads={self.kv_heads}: "
                "every KV head serves a whole group of query heads."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"AttentionConfig.window must be None or >= 1, got {self.window}.")
        if (rotary_dim := self.positions.rotary_dim) > self.head_dim:
            raise ValueError(f"rotary_dim={rotary_dim} is larger than head_dim={self.head_dim}.")
        if self.qk_norm_after_rope and (not self.qk_norm or self.qk_norm_scope is not QKNormScope.HEAD):
            raise ValueError(
                f"AttentionConfig.qk_norm_after_rope needs qk_norm=True and qk_norm_scope=head, got {self.qk_norm} and "
                f"{self.qk_norm_scope}."
            )
        if self.shares_kv and (
            self.qk_norm_after_rope or self.qk_norm_scope is not QKNormScope.HEAD or self.query_temperature is not None
        ):
            raise ValueError(
                "AttentionConfig.shares_kv is not implemented with qk_norm_after_rope=True, with qk_norm_scope="
                f"{self.qk_norm_scope}, or with query_temperature={self.query_temperature}."
            )
        if self.query_temperature is not None and self.qk_norm:
            raise ValueError("AttentionConfig.query_temperature is not implemented with qk_norm=True.")
        if self.real_kv_heads is not None and not 1 <= self.real_kv_heads <= self.kv_heads:
            raise ValueError(
                f"AttentionConfig.real_kv_heads={self.real_kv_heads} must be in [1, kv_heads={self.kv_heads}]."
            )

    def for_context(self, context: int) -> "AttentionConfig":
        """The attention of an engine whose requests have at most so many tokens."""
        temperature = self.query_temperature
        if temperature is not None and context <= temperature.original_context:
            temperature = None  # it is 1 at all positions
        return dataclasses.replace(self, positions=self.positions.for_context(context), query_temperature=temperature)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_parts(self) -> int:
        """Heads of the fused projection for each KV head, after its queries: its key and its value, or fewer."""
        if self.shares_kv:
            return 0
        return 1 if self.keys_are_values else 2

    @property
    def kv_values(self) -> int:
        """The number of values in the KV cache that attention reads for one token: its keys and its values."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def slopes(self) -> tuple[float, ...]:
        """ALiBi's slope of each query head."""
        return alibi_slopes(self.q_heads) if self.alibi is None else self.alibi

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale
