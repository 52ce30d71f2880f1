"""MiniMax-M2: experts in every layer by a sigmoid with a bias, norms over all heads, part of each head rotated."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, QKNormScope, RouterConfig, RouterKind
from jaxinfer.models.families import experts, llama, mixtral
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0}
_NAMES = dataclasses.replace(mixtral.NAMES, selection_bias="block_sparse_moe.e_score_correction_bias")


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    fields = Fields(hf)
    for name, only in (("scoring_func", "sigmoid"), ("shared_intermediate_size", 0)):
        fields.expect(name, only)
    for name in ("use_qk_norm", "use_routing_bias"):
        fields.expect(name, True)
    rotated = fields.optional(int, "rotary_dim")  # as the published files say it
    if rotated is not None and fields.optional(float, "partial_rotary_factor") is None:
        hf |= {"partial_rotary_factor": rotated / fields.integer("head_dim", least=1)}
    router = RouterConfig(
        experts=fields.integer("num_local_experts", "num_experts", default=256),
        experts_per_token=fields.integer("num_experts_per_tok", default=8),
        kind=RouterKind.SIGMOID,
        selection_bias=True,
    )
    config = llama.base_config(hf).with_attention(qk_norm=True, qk_norm_scope=QKNormScope.ALL_HEADS)
    return experts.with_experts(config, MoeConfig(router=router))


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return experts.sources(config, _NAMES)


FAMILY = dataclasses.replace(
    mixtral.FAMILY, model_types=("minimax_m2",), published=("MiniMax-M2",), config=_config, sources=_sources
)
