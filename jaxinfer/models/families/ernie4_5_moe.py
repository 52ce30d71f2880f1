"""ERNIE 4.5 with experts: a softmax whose choice a bias changes, and an MLP for all tokens."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import DecoderConfig, MoeConfig, RouterConfig
from jaxinfer.models.families import experts, llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source

_DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
_NAMES = experts.ExpertNames(selection_bias="mlp.moe_statics.e_score_correction_bias", shared="mlp.shared_experts")


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    fields, config = Fields(hf), llama.base_config(hf)
    fields.expect("moe_norm_min", 1e-12)  # the least that weights are divided by, which their sum exceeds
    bias = fields.flag("use_bias", default=False)
    if bias:
        fields.expect("tie_word_embeddings", False, "its head has a bias of its own (use_bias)")
    config = dataclasses.replace(config, head_bias=bias and not config.tied)
    config = config.with_mlp(bias=bias).with_attention(qkv_bias=bias, out_bias=bias)
    hidden = fields.integer("moe_intermediate_size", default=1536)
    moe = MoeConfig(
        router=RouterConfig(
            experts=fields.integer("moe_num_experts", "num_experts", default=64),
            experts_per_token=fields.integer("moe_k", "num_experts_per_tok", default=6),
            selection_bias=True,
        ),
        shared_hidden=hidden * fields.integer("moe_num_shared_experts", default=2, least=0),
    )
    return experts.with_experts(config, moe, hidden=hidden, sparse=_sparse(fields, config.layers))


def _sparse(fields: Fields, layers: int) -> list[bool]:
    """List which layers have experts: every n-th of those from a first one to a last one."""
    first, last = fields.integer("moe_layer_start_index", default=1), fields.integer("moe_layer_end_index", default=-1)
    step = fields.integer("moe_layer_interval", default=1, least=1)
    last = layers - 1 if last == -1 else last
    return [(layer + 1) % step == 0 and first <= layer <= last for layer in range(layers)]


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = experts.sources(config, _NAMES, rotates_pairs=True)
    for layer in config.moe_layers:
        leaf = f"layers.{layer}.mlp.router.selection_bias"
        ((count,),) = sources[leaf].shapes
        sources[leaf] = dataclasses.replace(sources[leaf], shapes=((1, count),), combine=np.ravel)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("ernie4_5_moe",),
    published=("ERNIE 4.5 21B-A3B and 300B-A47B",),
    config=_config,
    sources=_sources,
    ignored=rf"{llama.IGNORED}|mtp_.*",  # what predicts the token after the next
    renamed=(("mlp.gate.moe_statics.", "mlp.moe_statics."),),  # as transformers 5 has it in memory
)
