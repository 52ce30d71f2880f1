"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, RouterConfig
from jaxinfer.models.families import llama, qwen3
from jaxinfer.models.families.experts import ExpertNames, expert_sources
from jaxinfer.models.families.fields import Fields, cycle
from jaxinfer.models.families.mapping import Source


def with_experts(config: DecoderConfig, fields: Fields, moe: MoeConfig) -> DecoderConfig:
    """Return the config with experts in the layers that Qwen's fields name, and its MLP in the others."""
    experts = dataclasses.replace(config.mlp, hidden=fields.integer("moe_intermediate_size"), moe=moe)
    step = fields.integer("decoder_sparse_step", default=1, least=1)
    dense = fields.integers("mlp_only_layers") or ()
    mlps = [config.mlp if i in dense or (i + 1) % step else experts for i in range(config.layers)]
    mlp, *others = cycle(mlps)
    return dataclasses.replace(config, mlp=mlp, layer_mlps=(mlp, *others) if others else ())


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    router = RouterConfig(
        experts=fields.integer("num_experts", "num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        normalize=fields.flag("norm_topk_prob", default=False),
    )
    return with_experts(qwen3.config(hf), fields, MoeConfig(router=router))


def sources(config: DecoderConfig) -> dict[str, Source]:
    """Return the tensors of Qwen2-MoE and Qwen3-MoE."""
    sources = llama.sources(config)
    for i in config.moe_layers:
        module = f"layers.{i}.mlp"
        sources |= expert_sources(module, module, config.mlp_in(i), config.embed, ExpertNames())
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("qwen3_moe",), published=("Qwen3 MoE",), config=_config, sources=sources
)
