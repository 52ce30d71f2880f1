"""Ministral: Mistral with a window in some or all layers."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import SLIDING, Fields


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields({"sliding_window": 4096} | dict(hf))  # null means none
    config = llama.base_config({"num_key_value_heads": 8} | dict(hf))
    windows = fields.windows(fields.optional(int, "sliding_window"), [SLIDING] * config.layers)
    return config.with_windows(windows)


FAMILY = dataclasses.replace(llama.FAMILY, model_types=("ministral",), published=("Ministral 8B",), config=_config)
