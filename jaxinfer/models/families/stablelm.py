"""StableLM: Llama with LayerNorms and partial rotary positions; in some, parallel blocks or normalised heads."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import BlockKind, DecoderConfig, NormConfig, NormKind, QKNormScope
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, constant

_DEFAULTS = {"num_key_value_heads": 32, "partial_rotary_factor": 0.25}


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields, config = Fields(hf), llama.base_config(_DEFAULTS | dict(hf))
    parallel = fields.flag("use_parallel_residual", default=False)
    config = dataclasses.replace(
        config.with_block(BlockKind.PARALLEL if parallel else BlockKind.SEQUENTIAL),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_eps", default=1e-5)),
    )
    return config.with_attention(
        qkv_bias=fields.flag("use_qkv_bias", default=False),
        qk_norm=fields.flag("qk_layernorm", default=False),
        qk_norm_scope=QKNormScope.HEAD_OWN_WEIGHTS,
    )


def _joined(*norms: np.ndarray) -> np.ndarray:
    """Join the scales of all heads."""
    return np.concatenate(norms)


def _sources(config: DecoderConfig) -> dict[str, Source]:
    sources = llama.sources(config)
    for i in range(config.layers):
        attention = config.layer(i).attention
        if not attention.qk_norm:
            continue
        for part, heads in (("q", attention.q_heads), ("k", attention.kv_heads)):
            leaf, name = f"layers.{i}.attention.{part}_norm", f"layers.{i}.self_attn.{part}_layernorm.norms"
            names = tuple(f"{name}.{head}.weight" for head in range(heads))
            sources[f"{leaf}.scale"] = Source(names, ((attention.head_dim,),) * heads, _joined)
            sources |= constant(f"{leaf}.bias", 0.0, heads * attention.head_dim)
    return sources


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("stablelm",), published=("StableLM",), config=_config, sources=_sources
)
