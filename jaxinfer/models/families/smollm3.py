"""SmolLM3: Llama without positions in every fourth layer (NoPE, arXiv:2305.19466)."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import NO_POSITIONS, DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import FULL, SLIDING, Fields

_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    fields, config = Fields(hf), llama.config(hf)
    interval = fields.integer("no_rope_layer_interval", default=4, least=1)
    rotary = fields.per_layer("no_rope_layers", config.layers)  # 0 where there are none
    if rotary and set(map(str, rotary)) - {"0", "1"}:
        raise ValueError(f"config.json: no_rope_layers={rotary} must have 0 or 1 for each layer; correct it.")
    rotary = rotary or [(i + 1) % interval for i in range(config.layers)]
    window = fields.optional(int, "sliding_window") if fields.flag("use_sliding_window", default=False) else None
    default = [FULL if has or window is None else SLIDING for has in rotary]
    positions = config.layer(0).attention.positions
    config = config.with_positions([positions if has else NO_POSITIONS for has in rotary])
    return config.with_windows(fields.windows(window, default))


FAMILY = dataclasses.replace(llama.FAMILY, model_types=("smollm3",), published=("SmolLM3",), config=_config)
