"""Qwen2-MoE: Qwen2 with experts and a gated MLP for all tokens in some or all layers."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, RouterConfig, SharedMix
from jaxinfer.models.families import experts, llama
from jaxinfer.models.families.fields import FULL, SLIDING, Fields


def router(fields: Fields) -> RouterConfig:
    """The router of Qwen2-MoE and Qwen3-MoE."""
    return RouterConfig(
        experts=fields.integer("num_experts", "num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        normalize=fields.flag("norm_topk_prob", default=False),
    )


def with_experts(config: DecoderConfig, fields: Fields, moe: MoeConfig) -> DecoderConfig:
    """Return the config with experts in the layers that Qwen's fields name, and its MLP in the others."""
    step = fields.integer("decoder_sparse_step", default=1, least=1)
    dense = fields.integers("mlp_only_layers") or ()
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(config.layers)]
    return experts.with_experts(config, moe, hidden=fields.integer("moe_intermediate_size"), sparse=sparse)


def _windows(fields: Fields, layers: int) -> list[int | None]:
    """The window of each layer: none by default, else in every second one below `max_window_layers`."""
    window = None
    if fields.flag("use_sliding_window", default=False):
        window = fields.integer("sliding_window", default=4096)
    below = 0 if window is None else fields.integer("max_window_layers", default=28)
    return fields.windows(window, [SLIDING if i % 2 == 0 and i < below else FULL for i in range(layers)])


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config({"num_key_value_heads": 16} | dict(hf))
    moe = MoeConfig(
        router=router(fields),
        shared_hidden=fields.integer("shared_expert_intermediate_size", default=5632),
        shared_mix=SharedMix.GATED,
    )
    bias = fields.flag("qkv_bias", default=True)
    config = config.with_attention(qkv_bias=bias).with_windows(_windows(fields, config.layers))
    return with_experts(config, fields, moe)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("qwen2_moe",),
    published=("Qwen1.5-MoE", "Qwen2-57B-A14B"),
    config=_config,
    sources=experts.sources,
)
