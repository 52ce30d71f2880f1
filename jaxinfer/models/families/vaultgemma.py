"""VaultGemma: Gemma 2 without the norms after attention and MLP."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import BlockKind, DecoderConfig
from jaxinfer.models.families import gemma2, llama
from jaxinfer.models.families.mapping import Source


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    return gemma2.base_config({"num_key_value_heads": 4} | dict(hf)).with_block(BlockKind.SEQUENTIAL)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = gemma2.sources(config)
    return {leaf: source for leaf, source in sources.items() if not leaf.endswith("post_norm.scale")}


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("vaultgemma",), published=("VaultGemma",), config=_config, sources=_sources
)
