"""EXAONE 4: norms after attention and MLP, normalised heads, and in models with windows positions only in those."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import NO_POSITIONS, BlockKind, DecoderConfig
from jaxinfer.models.families import llama, olmo2
from jaxinfer.models.families.fields import FULL, SLIDING, Fields

_DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}  # null means no window


def base_config(hf: Mapping[str, object]) -> DecoderConfig:
    """The part of a config that EXAONE 4 and its relative with experts have in common."""
    fields = Fields(_DEFAULTS | dict(hf))
    config = llama.base_config(fields.values).with_attention(qk_norm=True)
    window = fields.optional(int, "sliding_window")
    if window is None:
        return config
    default = [FULL] * config.layers
    if not fields.optional(list, "layer_types"):  # else the pattern may be a text, which transformers does not read
        default = fields.every_nth_full(config.layers, "sliding_window_pattern", default=4)
    rotary = config.layer(0).attention.positions
    positions = [rotary if kind == SLIDING else NO_POSITIONS for kind in fields.layer_types(default)]
    return config.with_windows(fields.windows(window, default)).with_positions(positions)


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    return base_config(hf).with_block(BlockKind.REORDERED)


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("exaone4",), published=("EXAONE 4",), config=_config, sources=olmo2.sources
)
