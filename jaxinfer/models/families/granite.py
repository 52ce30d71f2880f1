"""Granite: Llama with factors for the embeddings, the scores, the residual stream and the logits."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields


def with_factors(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """Return the config with Granite's factors."""
    config = dataclasses.replace(
        config,
        embed_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logit_scale=1 / fields.positive("logits_scaling", default=1.0),
    )
    return config.with_attention(scale=fields.number("attention_multiplier", default=1.0))


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    return with_factors(llama.config(hf), Fields(hf))


FAMILY = dataclasses.replace(llama.FAMILY, model_types=("granite",), published=("Granite 3",), config=_config)
