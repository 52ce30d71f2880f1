"""StarCoder 2: Llama's tensors with LayerNorms, biases, an MLP that is not gated and a sliding window."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, NormConfig, NormKind
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields

_DEFAULTS = {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config(_DEFAULTS | dict(hf))
    bias = fields.flag("use_bias", default=True)
    config = dataclasses.replace(
        config.with_mlp(gated=False, bias=bias),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("norm_epsilon", default=1e-5)),
    )
    window = fields.optional(int, "sliding_window")
    return config.with_attention(qkv_bias=bias, out_bias=bias, window=window)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("starcoder2",),
    published=("StarCoder 2",),
    config=_config,
    renamed=(("mlp.c_fc.", "mlp.up_proj."), ("mlp.c_proj.", "mlp.down_proj.")),
)
