"""Granite-MoE with an MLP that all tokens go through as well."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import experts, granitemoe
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_NAMES = dataclasses.replace(granitemoe.NAMES, shared="shared_mlp", shared_fused=("input_linear", "output_linear"))


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    shared = Fields(hf).integer("shared_intermediate_size", default=0, least=0)
    return granitemoe.config(hf, shared_hidden=shared)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return experts.sources(config, _NAMES)


FAMILY = dataclasses.replace(
    granitemoe.FAMILY,
    model_types=("granitemoeshared",),
    published=("Granite MoE with a shared expert",),
    config=_config,
    sources=_sources,
)
