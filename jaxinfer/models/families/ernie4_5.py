"""ERNIE 4.5, the dense models: Llama with a rotation of neighbouring features."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    bias = Fields(hf).flag("use_bias", default=False)
    return llama.base_config(_DEFAULTS | dict(hf)).with_mlp(bias=bias).with_attention(qkv_bias=bias, out_bias=bias)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return llama.sources(config, rotates_pairs=True)


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("ernie4_5",), published=("ERNIE 4.5 0.3B",), config=_config, sources=_sources
)
