"""The planner's shape of a decoder, from its config."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jaxinfer.checkpoints import Leaf
from jaxinfer.models.config import AttentionConfig, DecoderConfig, DeltaRuleConfig, LayerConfig, Mixer
from jaxinfer.models.leaves import leaves_of_part
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.planner import LayerShape, ModelShape
from jaxinfer.sharding.planner.shapes import delta_rule


def shape_of(name: str, config: DecoderConfig) -> ModelShape:
    """Return what the planner needs to know of a model: windows, shared MLPs and experts of each kind of layer.

    name: what errors and tables call it.
    """
    counts = Counter(config.layer_kinds)
    each = config.with_layers(list(counts))  # one of each kind: their leaves take building a model
    layers = tuple(_layer(each, layer, count) for layer, count in enumerate(counts.values()))
    outer = leaves_of_part(each, WeightFormat(), None).values()
    return ModelShape(
        name=name,
        hidden=config.embed,
        vocab=config.vocab,
        heads=math.gcd(*map(_heads, config.pattern)),
        tied=config.tied,
        layers=layers,
        whole_params=_params(leaf for leaf in outer if not _is_split(leaf)) + _left_out(config, each),
        word_width=0 if config.word_embed is None else config.word_embed,
        inputs_width=0 if config.layer_inputs is None else config.layers * config.layer_inputs,
    )


def _left_out(config: DecoderConfig, each: DecoderConfig) -> int:
    """The parameters that make the vectors of layers which `each` does not have (`layer_inputs`)."""
    return (config.layers - each.layers) * (config.layer_inputs or 0) * config.embed


def _heads(kind: LayerConfig) -> int:
    """The heads that devices divide."""
    mixer = kind.mixer
    return mixer.key_heads if isinstance(mixer, DeltaRuleConfig) else kind.attention.q_heads


def _mixer(embed: int, mixer: Mixer) -> dict[str, Any]:
    """The fields of `LayerShape` that the mixer decides."""
    if isinstance(mixer, DeltaRuleConfig):
        return delta_rule(
            key_heads=mixer.key_heads,
            value_heads=mixer.value_heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            conv=mixer.conv,
        )
    assert isinstance(mixer, AttentionConfig)
    return {
        "kv_params": mixer.kv_parts * mixer.kv_heads * mixer.head_dim * embed,
        "shares_kv": mixer.shares_kv,
        "kv_values": mixer.kv_values,
        "kv_heads": mixer.kv_heads,
        "pair_flops": 4 * mixer.q_heads * mixer.head_dim,
        "window": mixer.window,
    }


def _layer(config: DecoderConfig, layer: int, count: int) -> LayerShape:
    kind, leaves = config.layer(layer), leaves_of_part(config, WeightFormat(), layer).values()
    mlp = kind.mlp
    shape = LayerShape(
        count=count,
        params=_params(leaf for leaf in leaves if _is_split(leaf)),
        whole_params=_params(leaf for leaf in leaves if not _is_split(leaf)),
        sums=1 if kind.block.is_parallel else 2,
        **_mixer(config.embed, kind.mixer),
    )
    if mlp.moe is None:
        return shape
    return dataclasses.replace(
        shape,
        experts=mlp.moe.router.experts,
        chosen=mlp.moe.router.experts_per_token,
        capacity_factor=mlp.moe.router.capacity_factor,
        expert_params=_params(leaves_of_part(config, WeightFormat(), layer, 0).values()),
    )


def _params(leaves: Iterable[Leaf]) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _is_split(leaf: Leaf) -> bool:
    """Return whether devices have parts of a leaf."""
    return any(axis in ShardingRules.SPLIT for axis in leaf.axes)
