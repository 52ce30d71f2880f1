"""Gemma 1: Llama with scaled embeddings, norms that multiply by 1 + weight, and a gated GELU."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import gemma2, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, norm

_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields(hf)
    fields.expect("use_bidirectional_attention", False)
    activation = fields.optional(str, "hidden_act") or "gelu"
    # As transformers: "gelu", which the first files have, means the tanh approximation here.
    tanh = {"hidden_act": "gelu_pytorch_tanh"} if activation == "gelu" else {}
    config = llama.base_config(_DEFAULTS | dict(hf) | tanh)
    bias = fields.flag("attention_bias", default=False)
    return dataclasses.replace(config, embed_scale=config.embed**0.5).with_attention(qkv_bias=bias, out_bias=bias)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = llama.sources(config) | norm("final_norm", "norm", config.embed, combine=gemma2.one_plus)
    for layer in (f"layers.{i}" for i in range(config.layers)):
        for ours, theirs in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            sources |= norm(f"{layer}.{ours}", f"{layer}.{theirs}", config.embed, combine=gemma2.one_plus)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("gemma",), published=("Gemma 1", "CodeGemma"), config=_config, sources=_sources
)
