"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one LayerNorm, biases everywhere."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import BlockKind, DecoderConfig, NormConfig, NormKind
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields

_DEFAULTS = {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config(_DEFAULTS | dict(hf))
    fields.expect("tie_word_embeddings", False)  # the head has a bias of its own
    config = dataclasses.replace(
        config.with_block(BlockKind.PARALLEL).with_mlp(gated=False, bias=True),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_eps", default=1e-5)),
        head_bias=True,
    )
    qk_norm = fields.flag("qk_layernorm", default=False)
    return config.with_attention(qkv_bias=True, out_bias=True, qk_norm=qk_norm)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("phi",),
    published=("Phi-1", "Phi-1.5", "Phi-2"),
    config=_config,
    renamed=(
        ("self_attn.dense.", "self_attn.o_proj."),
        *(("q_layernorm.", "q_norm."), ("k_layernorm.", "k_norm.")),
        *(("mlp.fc1.", "mlp.up_proj."), ("mlp.fc2.", "mlp.down_proj.")),
        ("final_layernorm.", "norm."),
    ),
)
