"""Solar Open: GLM-4.5 with all features of a head rotated, and experts in every layer."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import experts, glm4_moe, llama
from jaxinfer.models.families.fields import Fields

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    fields = Fields(hf)
    fields.expect("use_qk_norm", False)
    fields.expect("first_k_dense_replace", 0)
    width = fields.integer("moe_intermediate_size")
    config = llama.base_config(hf | {"intermediate_size": width})  # no layer has an MLP of another width
    config = config.with_attention(qkv_bias=fields.flag("attention_bias", default=False))
    return experts.with_deepseek_experts(config, fields, first_dense=0, normalize=True)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("solar_open",),
    published=("Solar Open",),
    config=_config,
    sources=glm4_moe.sources,
)
