"""Command R: parallel blocks after one LayerNorm without bias, neighbours rotated together, scaled logits."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import BlockKind, DecoderConfig, NormConfig, NormKind, QKNormScope
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, constant, pairs_to_halves


def base_config(hf: Mapping[str, object]) -> DecoderConfig:
    """The part of a config that Command R and Command R7B have in common."""
    hf = {"tie_word_embeddings": True} | dict(hf)
    fields, config = Fields(hf), llama.base_config(hf)
    bias = fields.flag("attention_bias", default=False)
    config = dataclasses.replace(
        config.with_block(BlockKind.PARALLEL),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_eps", default=1e-5)),
        logit_scale=fields.number("logit_scale", default=0.0625),
    )
    return config.with_attention(qkv_bias=bias, out_bias=bias)


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    qk_norm = Fields(hf).flag("use_qk_norm", default=False)
    config = base_config({"rope_theta": 500_000.0} | dict(hf))
    return config.with_attention(qk_norm=qk_norm, qk_norm_scope=QKNormScope.HEAD_OWN_WEIGHTS)


def sources(config: DecoderConfig) -> dict[str, Source]:
    """The tensors of Command R and Command R7B."""
    sources = llama.sources(config, rotates_pairs=True) | constant("final_norm.bias", 0.0, config.embed)
    for i in range(config.layers):
        layer, attention = f"layers.{i}", config.layer(i).attention
        sources |= constant(f"{layer}.attention_norm.bias", 0.0, config.embed)
        if attention.qk_norm:
            for name, heads in (("q_norm", attention.q_heads), ("k_norm", attention.kv_heads)):
                sources |= _head_norms(f"{layer}.attention.{name}", f"{layer}.self_attn.{name}", heads, config)
    return sources


def _head_norms(leaf: str, name: str, heads: int, config: DecoderConfig) -> dict[str, Source]:
    """The norm of each head by weights of its own, whose features go where those of the heads go."""
    size, dim = config.layer(0).attention.head_dim, llama.rotary_dim(config)

    def combine(weight: np.ndarray) -> np.ndarray:
        return pairs_to_halves(weight.reshape(-1), size, dim)

    scale = Source((f"{name}.weight",), ((heads, size),), combine)
    return {f"{leaf}.scale": scale} | constant(f"{leaf}.bias", 0.0, heads * size)


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("cohere",), published=("Command R", "Aya"), config=_config, sources=sources
)
