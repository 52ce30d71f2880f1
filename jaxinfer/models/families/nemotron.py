"""Nemotron and Minitron: Arcee's MLP, LayerNorms that multiply by 1 + weight, and half of each head rotated."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, NormConfig, NormKind
from jaxinfer.models.families import arcee, gemma2, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    config = arcee.config({"partial_rotary_factor": 0.5} | dict(hf))
    norm = NormConfig(kind=NormKind.LAYER, eps=Fields(hf).number("norm_eps", default=1e-5))
    return dataclasses.replace(config, norm=norm)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return {
        leaf: dataclasses.replace(source, combine=gemma2.one_plus) if leaf.endswith("norm.scale") else source
        for leaf, source in llama.sources(config).items()
    }


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("nemotron",),
    published=("Nemotron-4 and Minitron",),
    config=_config,
    sources=_sources,
)
