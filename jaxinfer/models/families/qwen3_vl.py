"""Qwen3-VL: the Qwen3 in a model that also sees."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import qwen3
from jaxinfer.models.families.text_part import text_part

_AXES = ("mrope_section", "mrope_interleaved")
"""How positions in images are divided into three axes. All three axes of a text are equal, so nothing is divided."""


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = {"rope_theta": 500_000.0} | dict(hf)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := hf.get(name), Mapping):
            hf[name] = {key: value for key, value in rope.items() if key not in _AXES}
    return qwen3.config(hf)


FAMILY = text_part(
    dataclasses.replace(qwen3.FAMILY, model_types=("qwen3_vl_text",), published=("Qwen3-VL",), config=_config),
    "qwen3_vl",
)
