"""Phi-3 and Phi-4: Llama with fused projections and a sliding window."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields, refuse
from jaxinfer.models.families.mapping import (
    Source,
    alternate_from_fused,
    by_kv_head_from_fused,
    linear,
    qkv_rows,
)

_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config(_DEFAULTS | dict(hf))
    for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):  # Phi-4-mini has these fields
        fields.expect(bias, False)
    scaling = config.layer(0).attention.positions.scaling
    if scaling is not None and scaling.kind != "longrope":
        refuse(f"config.json: rope_type={scaling.kind!r} is not implemented in phi3, only 'longrope'.")
    return config.with_attention(window=fields.optional(int, "sliding_window"))


def fused_gate_up(config: DecoderConfig) -> dict[str, Source]:
    """The sources of gated MLPs whose first projection has all gates, then all ups."""
    sources = {}
    for i in range(config.layers):
        name = f"layers.{i}.mlp.gate_up"
        rows = (2 * config.layer(i).mlp.hidden,)
        sources |= linear(name, (f"{name}_proj",), rows, config.embed, bias=False, combine=alternate_from_fused)
    return sources


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = llama.sources(config) | fused_gate_up(config)
    for i in range(config.layers):
        layer, attention = f"layers.{i}", config.layer(i).attention
        sources |= linear(
            f"{layer}.attention.qkv",
            (f"{layer}.self_attn.qkv_proj",),
            (sum(qkv_rows(attention)),),
            config.embed,
            bias=False,
            combine=by_kv_head_from_fused(attention),
        )
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("phi3",), published=("Phi-3", "Phi-4"), config=_config, sources=_sources
)
