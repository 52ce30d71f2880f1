"""GLM-4-0414 and GLM-Z1: GLM-4 with norms also after attention and MLP."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import BlockKind, DecoderConfig
from jaxinfer.models.families import glm
from jaxinfer.models.families.mapping import Source, norm


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    return glm.base_config(hf).with_block(BlockKind.SANDWICH)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = glm.sources(config)
    for i in range(config.layers):
        layer = f"layers.{i}"
        sources |= norm(f"{layer}.attention_post_norm", f"{layer}.post_self_attn_layernorm", config.embed)
        sources |= norm(f"{layer}.mlp_post_norm", f"{layer}.post_mlp_layernorm", config.embed)
    return sources


FAMILY = dataclasses.replace(
    glm.FAMILY, model_types=("glm4",), published=("GLM-4-0414",), config=_config, sources=_sources
)
