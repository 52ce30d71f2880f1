"""Qwen3.5-MoE: Qwen3.5 with experts and a gated MLP for all tokens in every layer."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, RouterConfig, SharedMix
from jaxinfer.models.families import delta_rule, experts, llama, qwen3_5
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.text_part import text_part


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    fields.expect("norm_topk_prob", True)
    hidden = fields.integer("moe_intermediate_size", default=512)
    config = qwen3_5.config({"num_key_value_heads": 2} | dict(hf) | {"intermediate_size": hidden})
    router = RouterConfig(
        experts=fields.integer("num_experts", "num_local_experts", default=256),
        experts_per_token=fields.integer("num_experts_per_tok", default=8),
    )
    shared = fields.integer("shared_expert_intermediate_size", default=512)
    return experts.with_experts(config, MoeConfig(router=router, shared_hidden=shared, shared_mix=SharedMix.GATED))


FAMILY = text_part(
    dataclasses.replace(
        llama.FAMILY,
        model_types=("qwen3_5_moe_text",),
        published=("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"),
        config=_config,
        sources=qwen3_5.sources,
        ignored=delta_rule.IGNORED,
    ),
    "qwen3_5_moe",
    alone=True,
)
