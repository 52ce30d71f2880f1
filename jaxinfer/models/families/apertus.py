"""Apertus: Llama with normalised heads, and an MLP of xIELUs that is not gated (arXiv:2509.14233)."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import Activation, DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0} | dict(hf)
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf |= {"rope_parameters": _ROPE}
    fields = Fields(hf)
    fields.expect("mlp_bias", False)
    bias = fields.flag("attention_bias", default=False)
    named = fields.optional(str, "hidden_act")
    config = llama.base_config(hf | {"hidden_act": None if named == "xielu" else named})
    if named in (None, "xielu"):
        config = config.with_mlp(activation=Activation.XIELU, gated=False)
    return config.with_mlp(gated=False).with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True)


def _factors(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """The factors of xIELU, of what a checkpoint has: softplus of the first, 0.5 + softplus of the second."""
    learned = np.concatenate((above, below)).astype(np.float32)
    return np.logaddexp(0, learned) + np.array([0, 0.5], np.float32)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = llama.sources(config)
    for layer in (f"layers.{i}.mlp" for i in range(config.layers)):
        names = f"{layer}.act_fn.alpha_p", f"{layer}.act_fn.alpha_n"
        if config.layer(0).mlp.activation is Activation.XIELU:
            sources[f"{layer}.xielu"] = Source(names, ((1,), (1,)), _factors)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("apertus",),
    published=("Apertus",),
    config=_config,
    sources=_sources,
    ignored=rf"{llama.IGNORED}|layers\.\d+\.mlp\.act_fn\.(beta|eps)",  # constants
    renamed=(("attention_layernorm", "input_layernorm"), ("feedforward_layernorm", "post_attention_layernorm")),
)
