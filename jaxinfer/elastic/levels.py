"""Levels: how many tokens each layer adds or merges (OTAS's gamma)."""

from jaxinfer.elastic.errors import LevelError
from jaxinfer.models.config import ViTConfig
from jaxinfer.models.token_adaptation import NO_ADAPTATION, MergeSchedule, PromptMode, TokenAdaptation

_SHARES = (1.25, 1.0, 0.75, 0.5, 0.25)
"""Of the patches, what default levels merge. Where it is more than all, the last layers merge half of what is left."""


def default_merge_levels(config: ViTConfig) -> tuple[int, ...]:
    """Levels that merge from a quarter of the patches to nearly all: -20, -16, -12, -8, -4 for ViT-B at 224 pixels."""
    per_layer, most = config.patches / config.layers, config.patches // 2
    return tuple(sorted({-min(max(1, round(share * per_layer)), most) for share in _SHARES}))


def check_level(level: int, config: ViTConfig) -> None:
    """Raise LevelError if the model cannot merge as many tokens."""
    if level < -(most := config.patches // 2):
        raise LevelError(
            f"level {level} merges {-level} tokens in each layer; of {config.tokens} tokens the first layer can merge "
            f"at most {most}: use a level from {-most} on."
        )


def adaptation_of(
    level: int,
    config: ViTConfig,
    *,
    schedule: MergeSchedule = MergeSchedule.CONSTANT,
    prompt_mode: PromptMode = PromptMode.REPLACE,
    protect_isolated: float | None = None,
) -> TokenAdaptation:
    """What a level does in each layer.

    Args:
      level: > 0 prompts that each layer has, 0 the plain model, < 0 tokens that each layer merges.
      config: the model's.
      schedule: how merges are divided over the layers.
      prompt_mode: what becomes of prompts in the next layer.
      protect_isolated: as of `merge_tokens`.
    Raises LevelError if the model cannot merge as many tokens.
    """
    check_level(level, config)
    if level > 0:
        return TokenAdaptation(prompts=level, prompt_mode=prompt_mode)
    if level == 0:
        return NO_ADAPTATION
    return TokenAdaptation(merges=schedule.merges(-level, config.layers), protect_isolated=protect_isolated)
