"""Levels: how many tokens each layer adds or merges (OTAS's gamma)."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.elastic.errors import LevelError
from jaxinfer.models.config import ViTConfig
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, MergeSchedule, PromptMode, TokenAdaptation

_SHARES = (1.25, 1.0, 0.75, 0.5, 0.25)
"""Of the patches, what default levels merge. Where it is more than all, the last layers merge half of what is left."""


def default_merge_levels(config: ViTConfig) -> tuple[int, ...]:
    """Levels that merge from a quarter of the patches to nearly all: -20, -16, -12, -8, -4 for ViT-B at 224 pixels."""
    per_layer, most = config.patches / config.layers, config.patches // 2
    return tuple(sorted({-min(max(1, round(share * per_layer)), most) for share in _SHARES}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """What each level of a service does.

    Attributes:
      config: the model's.
      merge_levels: those < 0, ascending.
      prompt_mode: what becomes of a layer's prompts in the next one.
      protect_isolated: as of `merge_tokens`.
      forced: how merges are divided over the layers, at all levels; None: as `schedules` says.
      schedules: what was chosen for merging levels (`profiling.schedules_of`); others are constant.
    Raises LevelError if a level does not merge, or more than the model can.
    """

    config: ViTConfig
    merge_levels: tuple[int, ...]
    prompt_mode: PromptMode
    protect_isolated: float | None
    forced: MergeSchedule | None
    schedules: Mapping[int, MergeSchedule]

    def __post_init__(self) -> None:
        if wrong := [level for level in self.merge_levels if level >= 0]:
            raise LevelError(f"merge_levels must be < 0, got {wrong}: prompts come with tasks.")
        config = self.config
        if wrong := [level for level in self.merge_levels if level < -(config.patches // 2)]:
            raise LevelError(
                f"level {wrong[0]} merges {-wrong[0]} tokens in each layer; of {config.tokens} tokens the first layer "
                f"can merge at most {config.patches // 2}: use a level from {-(config.patches // 2)} on."
            )

    def adaptation(self, level: int, schedule: MergeSchedule | None = None) -> TokenAdaptation:
        """What a level does in each layer; `schedule` takes the place of the one that it has."""
        if level > 0:
            return TokenAdaptation(prompts=level, prompt_mode=self.prompt_mode)
        if level == 0:
            return NO_ADAPTATION
        schedule = schedule or self.forced or self.schedules.get(level, MergeSchedule.CONSTANT)
        merges = schedule.merges(-level, self.config.layers)
        return TokenAdaptation(merges=merges, protect_isolated=self.protect_isolated)
