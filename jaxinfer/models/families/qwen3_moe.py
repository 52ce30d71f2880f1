"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig
from jaxinfer.models.families import experts, llama, qwen2_moe
from jaxinfer.models.families.fields import Fields


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    window = None
    if fields.flag("use_sliding_window", default=False):
        window = fields.integer("sliding_window", default=4096)
    bias = fields.flag("attention_bias", default=False)
    config = llama.base_config(hf).with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True, window=window)
    return qwen2_moe.with_experts(config, fields, MoeConfig(router=qwen2_moe.router(fields)))


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("qwen3_moe",),
    published=("Qwen3-30B-A3B", "Qwen3-235B-A22B"),
    config=_config,
    sources=experts.sources,
)
