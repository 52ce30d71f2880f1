"""Qwen2: Llama with biases on queries, keys and values, and a window in its upper layers."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields


def windows(fields: Fields, layers: int) -> list[int | None]:
    """The window of each layer in Qwen2 and Qwen3: none by default, else from layer `max_window_layers` on."""
    window = None
    if fields.flag("use_sliding_window", default=False):
        window = fields.integer("sliding_window", default=4096)
    full = layers if window is None else fields.integer("max_window_layers", default=28)
    return fields.windows(window, ["full_attention" if i < full else "sliding_attention" for i in range(layers)])


def config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Qwen2."""
    base = llama.base_config({"num_key_value_heads": 32} | dict(hf))
    return base.with_attention(qkv_bias=True).with_windows(windows(Fields(hf), base.layers))


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("qwen2",), published=("Qwen1.5", "Qwen2", "Qwen2.5"), config=config
)
