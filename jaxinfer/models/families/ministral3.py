"""Ministral 3: Mistral whose queries become larger with their position."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, QueryTemperature
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields

_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_OWN = "llama_4_scaling_beta"  # the field of its rope_parameters that no other family has


def config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Ministral 3."""
    hf = _DEFAULTS | dict(hf)
    fields = Fields(hf)
    name = fields.one_spelling("rope_parameters", "rope_scaling")
    rope = Fields(fields.optional(dict, name) or _ROPE, f"config.json: {name}")
    others = {key: value for key, value in rope.values.items() if key != _OWN}
    base = llama.base_config(hf | {name: others}).with_attention(window=fields.optional(int, "sliding_window"))
    beta = rope.optional(float, _OWN)
    if beta is None:
        return base
    original = rope.integer("original_max_position_embeddings", least=1)
    return base.with_attention(query_temperature=QueryTemperature(beta=beta, original_context=original))


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("ministral3",), published=("Ministral 3, text alone",), config=config
)
