"""OLMo 2: norms after attention and MLP, and over all query heads and all key heads (arXiv:2501.00656, section 3.2)."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import BlockKind, DecoderConfig, QKNormScope
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, norm


def base_config(hf: Mapping[str, object]) -> DecoderConfig:
    """The part of a config that OLMo 2 and 3 have in common."""
    hf = {"rms_norm_eps": 1e-5} | dict(hf)
    bias = Fields(hf).flag("attention_bias", default=False)
    config = llama.base_config(hf).with_block(BlockKind.REORDERED)
    return config.with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_scope=QKNormScope.ALL_HEADS)


def sources(config: DecoderConfig) -> dict[str, Source]:
    """The tensors of OLMo 2 and 3."""
    sources = llama.sources(config)
    for i in range(config.layers):
        sources |= norms(f"layers.{i}", config.embed)
    return sources


def norms(layer: str, embed: int) -> dict[str, Source]:
    """The norms after a layer's attention and after its MLP."""
    after_attention = norm(f"{layer}.attention_norm", f"{layer}.post_attention_layernorm", embed)
    return after_attention | norm(f"{layer}.mlp_norm", f"{layer}.post_feedforward_layernorm", embed)


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("olmo2",), published=("OLMo 2",), config=base_config, sources=sources
)
