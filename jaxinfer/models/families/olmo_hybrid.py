"""OLMo hybrid: a gated delta rule in most layers, OLMo 2's attention and norms after it in the others."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import NO_POSITIONS, BlockKind, DecoderConfig, DeltaRuleConfig
from jaxinfer.models.families import delta_rule, llama, olmo2
from jaxinfer.models.families.fields import FULL, Fields
from jaxinfer.models.families.mapping import Source, alternate, linear


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf, fields = {"rms_norm_eps": 1e-6} | dict(hf), Fields(hf)
    fields.expect("hidden_act", "silu")
    config = olmo2.base_config(hf)
    rope = fields.optional(dict, fields.one_spelling("rope_parameters", "rope_scaling")) or {}
    if rope.get("rope_theta", hf.get("rope_theta", 0)) is None:  # as published: attention goes by the causal mask alone
        config = config.with_attention(positions=NO_POSITIONS)
    heads = config.layer(0).attention.q_heads
    key_heads = fields.integer("linear_num_key_heads", default=heads, least=1)
    key_dim = fields.integer("linear_key_head_dim", default=int(0.75 * config.embed / key_heads))
    mixer = DeltaRuleConfig(
        key_heads=key_heads,
        value_heads=fields.integer("linear_num_value_heads", default=heads),
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", default=2 * key_dim),
        conv=fields.integer("linear_conv_kernel_dim", default=4),
        negative_eigenvalues=fields.flag("linear_allow_neg_eigval", default=True),
        norm_eps=1e-5,
    )
    kinds = delta_rule.layer_types(fields, config.layers)
    delta = dataclasses.replace(config.layer(0), mixer=mixer, block=BlockKind.SEQUENTIAL)
    kinds = kinds if FULL in kinds else [*kinds[:-1], FULL]
    return config.vary(lambda kind, name: delta if name == delta_rule.LINEAR else kind, kinds)


def _delta_rule(mixer: DeltaRuleConfig, layer: str, embed: int) -> dict[str, Source]:
    ours, theirs, values = f"{layer}.delta_rule", f"{layer}.linear_attn", mixer.value_heads
    q, k, v, gate, beta, step = (f"{theirs}.{name}_proj" for name in "qkvgba")
    rows = (mixer.key_heads * mixer.key_dim,) * 2 + (mixer.outputs,)
    sources = delta_rule.after_projections(mixer, layer, embed, norm_name="o_norm", out="o_proj")
    joined, convs = sources[f"{ours}.conv"], tuple(f"{theirs}.{part}_conv1d.weight" for part in "qkv")
    shapes = tuple((channels, 1, mixer.conv) for channels in rows)
    each = Source(convs, shapes, lambda *parts: joined.combine(np.concatenate(parts)), instead=joined, joined=True)
    return (
        sources
        | {f"{ours}.conv": each}
        | linear(f"{ours}.qkv", (q, k, v), rows, embed, bias=False, combine=delta_rule.rows_by_key_head(mixer))
        | linear(f"{ours}.gate", (gate,), (mixer.outputs,), embed, bias=False)
        | linear(f"{ours}.steps", (beta, step), (values, values), embed, bias=False, combine=alternate)
    )


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = llama.sources(config)
    for i in range(config.layers):
        layer, mixer = f"layers.{i}", config.layer(i).mixer
        if isinstance(mixer, DeltaRuleConfig):
            sources |= _delta_rule(mixer, layer, config.embed)
        else:
            sources |= olmo2.norms(layer, config.embed)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("olmo_hybrid",),
    published=("OLMo Hybrid",),
    config=_config,
    sources=_sources,
    renamed=(("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
)
