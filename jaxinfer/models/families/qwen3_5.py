"""Qwen3.5: a gated delta rule in most layers, gated attention in the others; norms multiply by 1 + weight."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, DeltaRuleConfig
from jaxinfer.models.families import delta_rule, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, alternate, linear
from jaxinfer.models.families.text_part import text_part, without_axes


def config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Qwen3.5."""
    hf = {"head_dim": 256, "num_key_value_heads": 4, "partial_rotary_factor": 0.25} | without_axes(hf)
    fields, base = Fields(hf), llama.base_config(hf)
    for name, value in (("hidden_act", "silu"), ("attention_bias", False), ("attn_output_gate", True)):
        fields.expect(name, value)
    return delta_rule.with_delta_rule(base.with_attention(qk_norm=True, output_gate=True), fields)


def _projections(mixer: DeltaRuleConfig, layer: str, embed: int) -> dict[str, Source]:
    ours, theirs, heads = f"{layer}.delta_rule", f"{layer}.linear_attn", mixer.value_heads
    qkv, steps = (f"{theirs}.in_proj_qkv",), (f"{theirs}.in_proj_b", f"{theirs}.in_proj_a")
    rows = mixer.key_heads * mixer.features
    by_head = delta_rule.rows_by_key_head(mixer)
    return (
        linear(f"{ours}.qkv", qkv, (rows,), embed, bias=False, combine=by_head)
        | linear(f"{ours}.gate", (f"{theirs}.in_proj_z",), (mixer.outputs,), embed, bias=False)
        | linear(f"{ours}.steps", steps, (heads, heads), embed, bias=False, combine=alternate)
    )


def sources(config: DecoderConfig) -> dict[str, Source]:
    """The tensors of Qwen3.5, with or without experts."""
    return delta_rule.sources(config, _projections)


FAMILY = text_part(
    dataclasses.replace(
        llama.FAMILY,
        model_types=("qwen3_5_text",),
        published=("Qwen3.5", "Qwen3.6-27B"),
        config=config,
        sources=sources,
        ignored=delta_rule.IGNORED,
    ),
    "qwen3_5",
    alone=True,
)
