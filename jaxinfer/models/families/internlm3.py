"""InternLM 3: Llama with biases under names of its own."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields

_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config(_DEFAULTS | dict(hf))
    bias = fields.flag("bias", "mlp_bias", default=False)  # of all matrices but queries, keys and values
    qkv_bias = fields.flag("qkv_bias", "attention_bias", default=False)
    return config.with_mlp(bias=bias).with_attention(qkv_bias=qkv_bias, out_bias=bias)


FAMILY = dataclasses.replace(llama.FAMILY, model_types=("internlm3",), published=("InternLM 3",), config=_config)
