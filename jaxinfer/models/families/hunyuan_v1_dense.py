"""Hunyuan v1: Llama whose query and key heads are normalised after rotation."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import llama
from jaxinfer.models.families.fields import Fields


def config(hf: Mapping[str, object]) -> DecoderConfig:
    """The config of Hunyuan v1; of experts, their MLPs."""
    hf = {"rms_norm_eps": 1e-5} | dict(hf)
    fields = Fields(hf)
    fields.expect("use_qk_norm", True)
    for name in ("use_cla", "use_mla"):
        fields.expect(name, False)
    name = fields.one_spelling("rope_parameters", "rope_scaling")
    rope = Fields(fields.optional(dict, name) or {}, f"config.json: {name}")
    alpha = rope.optional(float, "alpha")
    if alpha and rope.optional(str, "rope_type", "type") == "dynamic":  # with alpha it is a fixed stretch
        heads = fields.integer("num_attention_heads", least=1)
        head_dim = fields.optional(int, "head_dim") or fields.head_dim(fields.integer("hidden_size"), heads)
        if head_dim <= 2 or not 0 < alpha < 1e6:
            raise ValueError(
                f"config.json: {name}.alpha={alpha} must be in (0, 1e6), and head_dim={head_dim} > 2; correct it."
            )
        theta = rope.positive("rope_theta", default=fields.positive("rope_theta", default=10_000.0))
        hf |= {name: {"rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}}
    bias = fields.flag("attention_bias", default=False)
    return llama.base_config(hf).with_attention(qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_after_rope=True)


RENAMED = (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"))

FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("hunyuan_v1_dense",),
    published=("Hunyuan 0.5B to 7B",),
    config=config,
    renamed=RENAMED,
)
