"""Mixtral: Mistral with a mixture of experts in every layer (arXiv:2401.04088)."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, RouterConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.experts import ExpertNames, expert_sources
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1_000_000.0}
_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config(_DEFAULTS | dict(hf))
    router = RouterConfig(
        experts=fields.integer("num_local_experts", "num_experts", default=8),
        experts_per_token=fields.integer("num_experts_per_tok", default=2),
    )
    config = dataclasses.replace(config, mlp=dataclasses.replace(config.mlp, moe=MoeConfig(router=router)))
    return llama.with_attention(config, windows=(fields.optional(int, "sliding_window"),))


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = llama.sources(config)
    for i in config.moe_layers:
        module = f"layers.{i}.block_sparse_moe"
        sources |= expert_sources(f"layers.{i}.mlp", module, config.mlp_in(i), config.embed, _NAMES)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("mixtral",),
    published=("Mixtral",),
    config=_config,
    sources=_sources,
    renamed=((".mlp.", ".block_sparse_moe."),),  # as transformers 5 has it in memory
)
