"""Qwen3-VL: the Qwen3 in a model that also sees."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import qwen3
from jaxinfer.models.families.text_part import text_part, without_axes


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    return qwen3.config(without_axes({"rope_theta": 500_000.0} | dict(hf)))


FAMILY = text_part(
    dataclasses.replace(qwen3.FAMILY, model_types=("qwen3_vl_text",), published=("Qwen3-VL",), config=_config),
    "qwen3_vl",
)
