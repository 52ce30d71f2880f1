"""Gemma 2: norms around every block, soft caps, and a window in every other layer."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import BlockKind, DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, norm

_DEFAULTS = {  # of absent fields; null means something else
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def base_config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Gemma 2, which Gemma 3 begins with."""
    hf = _DEFAULTS | dict(hf)
    fields, config = Fields(hf), llama.base_config(hf)
    fields.expect("use_bidirectional_attention", False)
    activation = fields.activation("hidden_activation", default="gelu_pytorch_tanh")
    bias = fields.flag("attention_bias", default=False)
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.layers)]
    config = dataclasses.replace(
        config.with_block(BlockKind.SANDWICH).with_mlp(activation=activation),
        embed_scale=config.embed**0.5,
        tied=fields.flag("tie_word_embeddings", default=True),
        logit_softcap=fields.cap("final_logit_softcapping"),
    )
    return config.with_attention(
        qkv_bias=bias,
        out_bias=bias,
        scale=fields.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        softcap=fields.cap("attn_logit_softcapping"),
    ).with_windows(fields.windows(fields.optional(int, "sliding_window"), alternating))


def one_plus(weight: np.ndarray) -> np.ndarray:
    """Return 1 + weight, by which Gemma multiplies; in float32, as bfloat16 would round the sum."""
    return 1 + weight.astype(np.float32)


def sources(config: DecoderConfig) -> dict[str, Source]:
    """The tensors of Gemma 2."""
    sources = llama.sources(config) | norm("final_norm", "norm", config.embed, combine=one_plus)
    for i in range(config.layers):
        layer = f"layers.{i}"
        for ours, theirs in (
            ("attention_norm", "input_layernorm"),
            ("attention_post_norm", "post_attention_layernorm"),
            ("mlp_norm", "pre_feedforward_layernorm"),
            ("mlp_post_norm", "post_feedforward_layernorm"),
        ):
            sources |= norm(f"{layer}.{ours}", f"{layer}.{theirs}", config.embed, combine=one_plus)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("gemma2",), published=("Gemma 2",), config=base_config, sources=sources
)
