"""Hunyuan v3: Llama with normalised heads, and experts by a sigmoid with a bias in all but the first layer."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import experts, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11_158_840.0,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
}
_NAMES = experts.ExpertNames(router="mlp.router.gate", selection_bias="mlp.expert_bias", shared="mlp.shared_mlp")


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    fields = Fields(hf)
    for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        fields.expect(name, True)
    bias = fields.flag("attention_bias", default=False)
    config = llama.base_config(hf).with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True)
    config = config.with_mlp(bias=fields.flag("mlp_bias", default=False))
    return experts.with_deepseek_experts(config, fields, first_dense=1, normalize=True)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return experts.sources(config, _NAMES)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("hy_v3",),
    published=("Hunyuan v3 (Hy3)",),
    config=_config,
    sources=_sources,
    ignored=rf"{llama.IGNORED}|layers\.80\..*",  # what predicts the token after the next
    renamed=(  # as transformers 5 has it in memory
        ("mlp.gate.weight", "mlp.router.gate.weight"),
        ("mlp.e_score_correction_bias", "mlp.expert_bias"),
        ("mlp.shared_experts.", "mlp.shared_mlp."),
    ),
)
