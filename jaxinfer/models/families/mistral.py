"""Mistral: Llama with a sliding window."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields({"sliding_window": 4096} | dict(hf))  # null means none
    config = llama.base_config({"num_key_value_heads": 8} | dict(hf))
    fields.expect("layer_types", None, "alternating windows belong to other families")
    return config.with_attention(window=fields.optional(int, "sliding_window"))


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("mistral",), published=("Mistral 7B", "Mistral Nemo"), config=_config
)
