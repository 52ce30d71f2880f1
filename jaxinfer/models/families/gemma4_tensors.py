"""The tensors of Gemma 4."""

import dataclasses

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import experts, llama
from jaxinfer.models.families.mapping import Source, constant, linear, norm, only, table

IGNORED = rf"{llama.IGNORED}|layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.\w+"
"""Tensors that are not needed: among others keys and values of layers that use those of others."""
_EXPERTS = experts.ExpertNames(
    router="router.proj", parts=None, fused=("experts.gate_up_proj", "experts.down_proj"), shared="mlp"
)
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_NORMS_OF_EXPERTS = {
    "mlp.norms.before_shared": "pre_feedforward_layernorm",
    "mlp.norms.after_shared": "post_feedforward_layernorm_1",
    "mlp.norms.before_experts": "pre_feedforward_layernorm_2",
    "mlp.norms.after_experts": "post_feedforward_layernorm_2",
}


def sources(config: DecoderConfig) -> dict[str, Source]:
    """The tensors of Gemma 4."""
    embed, sources = config.embed, experts.sources(config, _EXPERTS)
    for i in range(config.layers):
        layer, moe = f"layers.{i}", config.layer(i).mlp.moe
        for ours, theirs in (_NORMS | (_NORMS_OF_EXPERTS if moe else {})).items():
            sources |= norm(f"{layer}.{ours}", f"{layer}.{theirs}", embed)
        sources[f"{layer}.output_scale"] = Source((f"{layer}.layer_scalar",), ((1,),), only)
        if moe is not None:
            count, router = moe.router.experts, f"{layer}.router"
            # Experts and the MLP have their own weights for what a norm without weights returns.
            sources |= constant(f"{layer}.mlp_norm.scale", 1.0, embed)
            names, shapes = (f"{router}.proj.weight", f"{router}.scale"), ((count, embed), (embed,))
            sources[f"{layer}.mlp.router.weight"] = Source(names, shapes, _scaled)
            sources[f"{layer}.mlp.router.expert_scale"] = Source((f"{router}.per_expert_scale",), ((count,),), only)
    return sources | (_layer_inputs(config, config.layer_inputs) if config.layer_inputs else {})


def _scaled(router: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiply a router's matrix by the factors of its inputs; in float32, since rounding may change a choice."""
    return router.astype(np.float32) * scale.astype(np.float32) * np.float32(router.shape[1] ** -0.5)


def _layer_inputs(config: DecoderConfig, width: int) -> dict[str, Source]:
    embed, outputs = config.embed, config.layers * width
    sources = table("layer_inputs.table.table", "embed_tokens_per_layer.weight", config.vocab, outputs)
    sources |= linear("layer_inputs.projection", ("per_layer_model_projection",), (outputs,), embed, bias=False)
    sources |= norm("layer_inputs.norm", "per_layer_projection_norm", width)
    for i in range(config.layers):
        layer = f"layers.{i}"
        sources |= linear(f"{layer}.input.gate", (f"{layer}.per_layer_input_gate",), (width,), embed, bias=False)
        sources |= linear(f"{layer}.input.projection", (f"{layer}.per_layer_projection",), (embed,), width, bias=False)
        sources |= norm(f"{layer}.input.norm", f"{layer}.post_per_layer_input_norm", embed)
    return sources


FAMILY = dataclasses.replace(llama.FAMILY, sources=sources, ignored=IGNORED)
