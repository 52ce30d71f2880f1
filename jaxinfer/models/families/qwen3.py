"""Qwen3: Llama with normalised query and key heads."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama, qwen2
from jaxinfer.models.families.fields import Fields


def config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Qwen3."""
    fields, base = Fields(hf), llama.base_config({"head_dim": 128, "num_key_value_heads": 32} | dict(hf))
    bias = fields.flag("attention_bias", default=False)
    base = base.with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True)
    return base.with_windows(qwen2.windows(fields, base.layers))


FAMILY = dataclasses.replace(llama.FAMILY, model_types=("qwen3",), published=("Qwen3",), config=config)
