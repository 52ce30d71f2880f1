"""Seed-OSS: Llama with heads of a width of their own, and biases on queries, keys and values."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config({"head_dim": 128, "num_key_value_heads": 8} | dict(hf))
    return config.with_mlp(bias=fields.flag("mlp_bias", default=False)).with_attention(
        qkv_bias=fields.flag("attention_bias", default=True), out_bias=fields.flag("attention_out_bias", default=False)
    )


FAMILY = dataclasses.replace(llama.FAMILY, model_types=("seed_oss",), published=("Seed-OSS",), config=_config)
