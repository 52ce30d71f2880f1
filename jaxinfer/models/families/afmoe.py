"""AFMoE (Arcee Trinity): EXAONE 4's windows and positions, an output gate, and norms around attention and MLP."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import NO_POSITIONS, BlockKind, DecoderConfig
from jaxinfer.models.families import experts, llama
from jaxinfer.models.families.fields import SLIDING, Fields
from jaxinfer.models.families.mapping import Source, linear, norm

_DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 1024,  # null means none
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
}
_NAMES = experts.ExpertNames(router="mlp.router.gate", selection_bias="mlp.expert_bias", shared="mlp.shared_experts")
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    fields = Fields(hf)
    for name, only in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        fields.expect(name, only)
    bias = fields.flag("attention_bias", default=False)
    config = llama.base_config(hf).with_block(BlockKind.SANDWICH)
    config = config.with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True, output_gate=True)
    if fields.flag("mup_enabled", default=False):
        config = dataclasses.replace(config, embed_scale=config.embed**0.5)
    default = fields.every_nth_full(config.layers, "global_attn_every_n_layers", default=4)
    rotary = config.layer(0).attention.positions
    config = config.with_windows(fields.windows(fields.optional(int, "sliding_window"), default))
    positions = [rotary if kind == SLIDING else NO_POSITIONS for kind in fields.layer_types(default)]
    routing = {
        "norm_topk_prob": True,
        "routed_scaling_factor": fields.number("route_scale", default=1.0),
        "first_k_dense_replace": fields.integer("num_dense_layers", default=1),
    }
    config = config.with_positions(positions)
    return experts.with_deepseek_experts(config, Fields(hf | routing), first_dense=1, normalize=True)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = experts.sources(config, _NAMES)
    for i in range(config.layers):
        layer, attention = f"layers.{i}", config.layer(i).attention
        for ours, theirs in _NORMS.items():
            sources |= norm(f"{layer}.{ours}", f"{layer}.{theirs}", config.embed)
        gates, module = attention.q_heads * attention.head_dim, f"{layer}.self_attn.gate_proj"
        sources |= linear(f"{layer}.attention.gate", (module,), (gates,), config.embed, bias=False)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("afmoe",), published=("Arcee Trinity",), config=_config, sources=_sources
)
