"""Mellum 2: Qwen3-MoE with windows and positions by kind of layer."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig
from jaxinfer.models.families import experts, llama, qwen2_moe
from jaxinfer.models.families.fields import FULL, Fields

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 1024,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 896,
    "norm_topk_prob": True,
}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    fields, base = Fields(hf), llama.base_config(hf | {"rope_parameters": None, "rope_scaling": None})
    bias = fields.flag("attention_bias", default=False)
    full = [FULL] * base.layers
    positions = fields.rotary_by_layer_type(
        base.layer(0).attention.head_dim, full_theta=500_000.0, sliding_theta=10_000.0, sliding_names=()
    )
    config = (
        base.with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True)
        .with_windows(fields.windows(fields.optional(int, "sliding_window"), full))
        .with_positions([positions[kind] for kind in fields.layer_types(full)])
    )
    moe, hidden = MoeConfig(router=qwen2_moe.router(fields)), fields.integer("moe_intermediate_size")
    sparse = experts.sparse_layers(fields, [True] * base.layers)
    return experts.with_experts(config, moe, hidden=hidden, sparse=sparse)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("mellum",),
    published=("Mellum 2",),
    config=_config,
    sources=experts.sources,
    ignored=rf"{llama.IGNORED}|mtp\..*",  # what predicts the token after the next
)
