"""Granite-MoE: Granite with experts in every layer."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, RouterConfig
from jaxinfer.models.families import experts, granite, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

NAMES = experts.ExpertNames(
    router="block_sparse_moe.router.layer",
    parts=None,
    fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)


def config(hf: Mapping[str, object], *, shared_hidden: int = 0) -> DecoderConfig:
    """The config of Granite-MoE, perhaps with an MLP of this width that every token goes through as well."""
    fields, base = Fields(hf), llama.base_config(hf)
    router = RouterConfig(
        experts=fields.integer("num_local_experts", default=8),
        experts_per_token=fields.integer("num_experts_per_tok", default=2),
    )
    bias = fields.flag("attention_bias", default=False)
    base = granite.with_factors(base.with_attention(qkv_bias=bias, out_bias=bias), fields)
    return experts.with_experts(base, MoeConfig(router=router, shared_hidden=shared_hidden))


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return experts.sources(config, NAMES)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("granitemoe",),
    published=("Granite 3 MoE",),
    config=config,
    sources=_sources,
    renamed=(  # as transformers 5 has them in memory
        ("moe.experts.gate_up_proj", "moe.input_linear.weight"),
        ("moe.experts.down_proj", "moe.output_linear.weight"),
        ("moe.router.weight", "moe.router.layer.weight"),
    ),
)
