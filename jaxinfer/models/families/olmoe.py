"""OLMoE: Llama with experts in every layer, and norms over all query heads and all key heads (arXiv:2409.02060)."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, QKNormScope, RouterConfig
from jaxinfer.models.families import experts, llama
from jaxinfer.models.families.fields import Fields


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = {"rms_norm_eps": 1e-5} | dict(hf)
    fields = Fields(hf)
    fields.expect("clip_qkv", None)
    router = RouterConfig(
        experts=fields.integer("num_experts", "num_local_experts", default=64),
        experts_per_token=fields.integer("num_experts_per_tok", default=8),
        normalize=fields.flag("norm_topk_prob", default=False),
    )
    bias = fields.flag("attention_bias", default=False)
    config = llama.base_config(hf).with_attention(
        qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_scope=QKNormScope.ALL_HEADS
    )
    return experts.with_experts(config, MoeConfig(router=router))


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("olmoe",), published=("OLMoE",), config=_config, sources=experts.sources
)
