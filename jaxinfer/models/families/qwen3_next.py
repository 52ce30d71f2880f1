"""Qwen3-Next: Qwen3.5-MoE with other tensors, and an MLP without experts in some layers."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import DecoderConfig, DeltaRuleConfig, MoeConfig, RouterConfig, SharedMix
from jaxinfer.models.families import delta_rule, llama, qwen2_moe, qwen3_5
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Source, alternate, linear


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    hf = {"num_key_value_heads": 2, "intermediate_size": 5632, "moe_intermediate_size": 512} | dict(hf)
    fields, config = Fields(hf), qwen3_5.config(hf)
    router = RouterConfig(
        experts=fields.integer("num_experts", "num_local_experts", default=512),
        experts_per_token=fields.integer("num_experts_per_tok", default=10),
        normalize=fields.flag("norm_topk_prob", default=True),
    )
    shared = fields.integer("shared_expert_intermediate_size", default=512)
    moe = MoeConfig(router=router, shared_hidden=shared, shared_mix=SharedMix.GATED)
    return qwen2_moe.with_experts(config, fields, moe)


def _projections(mixer: DeltaRuleConfig, layer: str, embed: int) -> dict[str, Source]:
    """The projections by key head: its query, key, values and gates; and its betas and steps."""
    ours, theirs, heads = f"{layer}.delta_rule", f"{layer}.linear_attn", mixer.key_heads

    def part(x: np.ndarray, rows: slice) -> np.ndarray:
        return x.reshape(heads, -1, *x.shape[1:])[:, rows].reshape(-1, *x.shape[1:])

    def steps(x: np.ndarray) -> np.ndarray:
        halves = np.split(x.reshape(heads, -1, *x.shape[1:]), 2, axis=1)
        return alternate(*(half.reshape(-1, *x.shape[1:]) for half in halves))

    qkvz, ba, size = f"{theirs}.in_proj_qkvz", f"{theirs}.in_proj_ba", mixer.features
    rows, before, after = heads * size + mixer.outputs, slice(size), slice(size, None)
    return (
        linear(f"{ours}.qkv", (qkvz,), (rows,), embed, bias=False, combine=lambda x: part(x, before))
        | linear(f"{ours}.gate", (qkvz,), (rows,), embed, bias=False, combine=lambda x: part(x, after))
        | linear(f"{ours}.steps", (ba,), (2 * mixer.value_heads,), embed, bias=False, combine=steps)
    )


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return delta_rule.sources(config, _projections)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("qwen3_next",),
    published=("Qwen3-Next",),
    config=_config,
    sources=_sources,
    ignored=delta_rule.IGNORED,
)
