"""dots.llm1: Qwen3 with DeepSeek V3's experts in all but the first layers (arXiv:2506.05767)."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import experts, glm4_moe, llama
from jaxinfer.models.families.fields import FULL, SLIDING, Fields


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields({"sliding_window": 4096} | dict(hf))  # null means none
    config = llama.base_config({"num_key_value_heads": 32} | dict(hf))
    full = fields.integer("max_window_layers", default=62)
    kinds = [FULL if i < full else SLIDING for i in range(config.layers)]
    bias = fields.flag("attention_bias", default=False)
    windows = fields.windows(fields.optional(int, "sliding_window"), kinds)
    config = config.with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True).with_windows(windows)
    return experts.with_deepseek_experts(config, fields, first_dense=0, normalize=False)


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("dots1",), published=("dots.llm1",), config=_config, sources=glm4_moe.sources
)
