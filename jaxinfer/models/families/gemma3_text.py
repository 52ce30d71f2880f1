"""Gemma 3: Gemma 2 with normalised query and key heads, and positions of their own in layers with a window."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import gemma2, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, norm

_DEFAULTS = {  # the published configs leave out what is so
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Gemma 3's text model."""
    hf = _DEFAULTS | dict(hf)
    fields = Fields(hf)
    fields.expect("attn_logit_softcapping", None)  # transformers 5.23 reads it, and does not apply it
    positions = fields.rotary_by_layer_type(
        fields.integer("head_dim"),
        full_theta=1_000_000.0,
        sliding_theta=10_000.0,
        sliding_names=("rope_local_base_freq",),
    )
    base = gemma2.base_config(hf | {"rope_parameters": None, "rope_scaling": None})
    pattern = ("sliding_window_pattern", "_sliding_window_pattern")
    default = fields.every_nth_full(base.layers, *pattern, default=6)
    base = base.with_positions([positions[kind] for kind in fields.layer_types(default)])
    windows = fields.windows(fields.optional(int, "sliding_window"), default)
    return base.with_attention(qk_norm=True).with_windows(windows)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = gemma2.sources(config)
    for i in range(config.layers):
        layer, size = f"layers.{i}", config.layer(i).attention.head_dim
        for name in ("q_norm", "k_norm"):
            sources |= norm(f"{layer}.attention.{name}", f"{layer}.self_attn.{name}", size, combine=gemma2.one_plus)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("gemma3_text",), published=("Gemma 3 270M and 1B",), config=config, sources=_sources
)
