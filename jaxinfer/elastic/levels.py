"""Levels: how many tokens each layer adds or merges (OTAS's gamma)."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from jaxinfer.elastic.errors import ElasticError, LevelError
from jaxinfer.models.config import ModelConfig, ViTConfig
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, MergeSchedule, PromptMode, TokenAdaptation

Level = Annotated[int, Meta(gt=-(2**30), lt=2**30, description="a level, an integer within 2**30")]
_SHARES = (1.25, 1.0, 0.75, 0.5, 0.25)
"""Share of patches each default level merges in total; above 1 the last layers halve what remains."""


def default_merge_levels(config: ViTConfig) -> tuple[int, ...]:
    """Return levels that merge a quarter of the patches to nearly all.

    For ViT-B at 224 pixels they are -20, -16, -12, -8, -4.
    """
    per_layer, most = config.patches / config.layers, config.patches // 2
    return tuple(sorted({-min(max(1, round(share * per_layer)), most) for share in _SHARES}))


def require_vit(folder: str | os.PathLike[str], config: ModelConfig) -> ViTConfig:
    """The config of a vision transformer. Raises ElasticError, which names the folder, for any other."""
    if not isinstance(config, ViTConfig):
        raise ElasticError(f"{folder} is no vision transformer; its tokens cannot be adapted for tasks.")
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """The token adaptations of a service's levels.

    Attributes:
      config: the model's config.
      merge_levels: the levels < 0, ascending.
      prompt_mode: how a layer's prompts continue in the next one.
      forced: the division of merges over layers at all levels; None: as in `schedules`.
      schedules: the divisions chosen for merging levels (`profiling.schedules_of`); others are constant.
    Raises LevelError if a level does not merge, or more than the model can.
    """

    config: ViTConfig
    merge_levels: tuple[int, ...]
    prompt_mode: PromptMode
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
        """A level's adaptation of each layer; `schedule` replaces its own."""
        if level > 0:
            return TokenAdaptation(prompts=level, prompt_mode=self.prompt_mode)
        if level == 0:
            return NO_ADAPTATION
        schedule = schedule or self.forced or self.schedules.get(level, MergeSchedule.CONSTANT)
        merges = schedule.merges(-level, self.config.layers)
        return TokenAdaptation(merges=merges)
