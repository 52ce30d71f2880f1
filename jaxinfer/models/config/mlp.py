"""The feed-forward block: an MLP, or a mixture of experts."""

import dataclasses
import enum
import math

from jaxinfer.models.config.checks import require_positive


class Activation(enum.StrEnum):
    """The MLP's nonlinearity."""

    GELU = "gelu"  # exact, with erf
    GELU_TANH = "gelu_tanh"  # the tanh approximation
    RELU = "relu"
    RELU2 = "relu2"  # the square of relu (arXiv:2109.08668)
    SILU = "silu"
    XIELU = "xielu"  # with two numbers that each layer has learned (arXiv:2411.13010)


class RouterKind(enum.StrEnum):
    """How a router's logits become scores of the experts."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"  # each by itself (DeepSeek V3)


class GroupScore(enum.StrEnum):
    """How a group of experts is scored by those in it."""

    MAX = "max"  # its best expert (DeepSeek V2)
    TOP_2_SUM = "top_2_sum"  # the sum of its two best, the selection bias included (DeepSeek V3)


class SharedMix(enum.StrEnum):
    """How the MLP that every token goes through is added to its experts."""

    ADD = "add"  # as it is (DeepSeek)
    GATED = "gated"  # times sigmoid(x g), with a gate g (Qwen2-MoE)
    NORMALIZED = "normalized"  # each normalised, before and after, with weights of its own (Gemma 4)
    RESIDUAL = "residual"  # both times their share of softmax(x C), with two coefficients (Residual-MoE)

    @property
    def gates(self) -> int:
        """The number of vectors that the weights are computed with."""
        return {SharedMix.GATED: 1, SharedMix.RESIDUAL: 2}.get(self, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How each token chooses its experts (DeepSeek V3, arXiv:2412.19437, section 2.1.2, has all of it)."""

    experts: int
    experts_per_token: int
    kind: RouterKind = RouterKind.SOFTMAX
    normalize: bool = True  # the weights of a token's experts are divided by their sum
    scale: float = 1.0  # then multiplies them
    expert_scale: bool = False  # then a learned number of the expert does (Gemma 4)
    selection_bias: bool = False  # a number for each expert is added to its score for the choice, not to its weight
    groups: int = 1  # of equally many experts
    groups_per_token: int = 1  # the best groups, of which a token's experts are
    group_score: GroupScore = GroupScore.MAX
    capacity_factor: float | None = None  # an expert takes this many times its even share of a pass's choices; the
    # later ones are dropped. None: it takes all

    def __post_init__(self) -> None:
        require_positive(self, "experts", "experts_per_token", "groups", "groups_per_token")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"RouterConfig.experts_per_token={self.experts_per_token} is more than experts={self.experts}."
            )
        if self.experts % self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"RouterConfig.groups={self.groups} must divide experts={self.experts}, and "
                f"groups_per_token={self.groups_per_token} be at most groups."
            )
        group = self.experts // self.groups
        if self.groups_per_token * group < self.experts_per_token:
            raise ValueError(
                f"RouterConfig.groups_per_token={self.groups_per_token} groups have {self.groups_per_token * group} "
                f"experts, fewer than experts_per_token={self.experts_per_token}."
            )
        if self.groups > 1 and self.group_score is GroupScore.TOP_2_SUM and group < 2:
            raise ValueError(f"RouterConfig.group_score={self.group_score} needs groups of two experts or more.")
        if self.capacity_factor is not None and not self.capacity_factor >= 1.0:
            raise ValueError(f"RouterConfig.capacity_factor must be at least 1, got {self.capacity_factor}.")

    def capacity(self, tokens: int) -> int | None:
        """Return how many of the choices of `tokens` tokens each expert takes; None: all.

        >>> RouterConfig(experts=8, experts_per_token=2, capacity_factor=1.25).capacity(64)
        20
        """
        if self.capacity_factor is None:
            return None
        return min(tokens, math.ceil(tokens * self.experts_per_token / self.experts * self.capacity_factor))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """A mixture of experts (DeepSpeed Inference, section V): MLPs of the sizes of the `MlpConfig` that it is in."""

    router: RouterConfig
    shared_hidden: int = 0  # width of an MLP that every token goes through as well; 0: there is none
    shared_mix: SharedMix = SharedMix.ADD
    shared_bias: bool = False  # that MLP has biases, although the experts have none

    def __post_init__(self) -> None:
        if self.shared_hidden < 0:
            raise ValueError(f"MoeConfig.shared_hidden must be >= 0, got {self.shared_hidden}.")
        if self.shared_mix is not SharedMix.ADD and not self.shared_hidden:
            raise ValueError(f"MoeConfig.shared_mix={self.shared_mix} needs a shared MLP: shared_hidden >= 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """The feed-forward block."""

    hidden: int  # with experts: of each
    activation: Activation
    gated: bool = False  # multiply the activation by a second projection (SwiGLU, GeGLU)
    bias: bool = False
    moe: MoeConfig | None = None  # None: one MLP for all tokens

    def __post_init__(self) -> None:
        require_positive(self, "hidden")
        if self.activation is Activation.XIELU and (self.gated or self.moe is not None):
            raise ValueError("MlpConfig.activation=xielu is not implemented in gated MLPs and in experts.")

    @property
    def shared(self) -> "MlpConfig | None":
        """The MLP beside the experts that every token goes through."""
        if self.moe is None or not self.moe.shared_hidden:
            return None
        bias = self.bias or self.moe.shared_bias
        return dataclasses.replace(self, hidden=self.moe.shared_hidden, bias=bias, moe=None)
