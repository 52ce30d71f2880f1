"""Mixtral: Mistral with a mixture of experts in every layer (arXiv:2401.04088)."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, RouterConfig
from jaxinfer.models.families import experts, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1_000_000.0}
_EXPERT = "block_sparse_moe.experts.{}."
NAMES = experts.ExpertNames(
    router="block_sparse_moe.gate",
    parts=(_EXPERT + "w1.weight", _EXPERT + "w3.weight", _EXPERT + "w2.weight"),
    fused=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
)


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config(_DEFAULTS | dict(hf))
    router = RouterConfig(
        experts=fields.integer("num_local_experts", "num_experts", default=8),
        experts_per_token=fields.integer("num_experts_per_tok", default=2),
    )
    config = config.with_attention(window=fields.optional(int, "sliding_window"))
    return experts.with_experts(config, MoeConfig(router=router))


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return experts.sources(config, NAMES)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("mixtral",),
    published=("Mixtral",),
    config=_config,
    sources=_sources,
    renamed=((".mlp.", ".block_sparse_moe."),),  # as transformers 5 has it in memory
)
