"""GLM-4 (9B): Llama with a fused gate and up projection, half of each head rotated, neighbours as pairs."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama, phi3
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}


def base_config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of GLM-4; of the 0414 release all but the norms."""
    config = llama.base_config(_DEFAULTS | dict(hf))
    return config.with_attention(qkv_bias=Fields(hf).flag("attention_bias", default=True))


def sources(config: DecoderConfig) -> dict[str, Source]:
    """The tensors of GLM-4."""
    return llama.sources(config, rotates_pairs=True) | phi3.fused_gate_up(config)


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("glm",), published=("GLM-4",), config=base_config, sources=sources
)
