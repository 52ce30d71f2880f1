"""GLM-4 (9B): Llama with a fused gate and up projection, half of each head rotated, neighbours as pairs."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama, phi3
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, by_kv_head, pairs_to_halves

_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}


def base_config(hf: Mapping[str, object]) -> DecoderConfig:
    """Return the config of GLM-4; of the 0414 release all but the norms."""
    config = llama.base_config(_DEFAULTS | dict(hf))
    return llama.with_attention(config, qkv_bias=Fields(hf).flag("attention_bias", default=True))


def sources(config: DecoderConfig) -> dict[str, Source]:
    """Return the tensors of GLM-4."""
    attention, rotary_dim = config.attention, config.positions.rotary_dim

    def joined(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q, k = (pairs_to_halves(rows, attention.head_dim, rotary_dim) for rows in (q, k))
        return by_kv_head(attention)(q, k, v)

    sources = llama.sources(config) | phi3.fused_gate_up(config)
    for i in range(config.layers):
        for part in ("weight", "bias") if attention.qkv_bias else ("weight",):
            leaf = f"layers.{i}.attention.qkv.{part}"
            sources[leaf] = dataclasses.replace(sources[leaf], combine=joined)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("glm",), published=("GLM-4",), config=base_config, sources=sources
)
