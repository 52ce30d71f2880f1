"""Qwen2.5-VL: the Qwen2 in a model that also sees."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import qwen2
from jaxinfer.models.families.text_part import text_part, without_axes

_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    return qwen2.config(without_axes(_DEFAULTS | dict(hf)))


FAMILY = text_part(
    dataclasses.replace(qwen2.FAMILY, model_types=("qwen2_5_vl_text",), published=("Qwen2.5-VL",), config=_config),
    "qwen2_5_vl",
    flat=True,
)
