"""Command R7B: Command R with a window in three of four layers, and no positions in the fourth."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import NO_POSITIONS, DecoderConfig
from jaxinfer.models.families import cohere
from jaxinfer.models.families.fields import Fields


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields({"sliding_window": 4096} | dict(hf))
    config = cohere.base_config(hf)
    default = fields.every_nth_full(config.layers, "sliding_window_pattern", default=4)
    windows = fields.windows(fields.optional(int, "sliding_window"), default)
    # As transformers: only layers with a window rotate.
    rotary = config.layer(0).attention.positions
    positions = [NO_POSITIONS if window is None else rotary for window in windows]
    return config.with_windows(windows).with_positions(positions)


FAMILY = dataclasses.replace(cohere.FAMILY, model_types=("cohere2",), published=("Command R7B",), config=_config)
