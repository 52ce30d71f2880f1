"""CWM (Code World Model): Llama with a window in all layers but every fourth."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import FULL, SLIDING, Fields

_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = _DEFAULTS | {"sliding_window": 8192} | dict(hf)
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf |= {"rope_parameters": _ROPE}
    fields, config = Fields(hf), llama.base_config(hf)
    fields.expect("attention_bias", False)
    default = [SLIDING if layer % 4 else FULL for layer in range(config.layers)]
    windows = fields.windows(fields.optional(int, "sliding_window") or None, default)  # 0, too, means none
    return config.with_mlp(bias=fields.flag("mlp_bias", default=False)).with_windows(windows)


FAMILY = dataclasses.replace(llama.FAMILY, model_types=("cwm",), published=("CWM",), config=_config)
