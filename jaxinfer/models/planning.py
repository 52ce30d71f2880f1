"""The planner's shape of a decoder, from its config."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable

from jaxinfer.checkpoints import Leaf
from jaxinfer.models.config import BlockKind, DecoderConfig
from jaxinfer.models.leaves import leaves_of_part
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.planner import LayerShape, ModelShape

PARALLEL = (BlockKind.PARALLEL, BlockKind.PARALLEL_TWO_NORMS)
"""Blocks that one sum over the devices finishes."""


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
        heads=math.gcd(*(kind.mixer.q_heads for kind in config.pattern)),
        tied=config.tied,
        layers=layers,
        whole_params=_params(leaf for leaf in outer if not _is_split(leaf)),
        word_width=0 if config.word_embed is None else config.word_embed,
    )


def _layer(config: DecoderConfig, layer: int, count: int) -> LayerShape:
    attention, mlp = config.layer(layer).mixer, config.layer(layer).mlp
    leaves = leaves_of_part(config, WeightFormat(), layer).values()
    shape = LayerShape(
        count=count,
        params=_params(leaf for leaf in leaves if _is_split(leaf)),
        kv_params=2 * attention.kv_heads * attention.head_dim * config.embed,
        whole_params=_params(leaf for leaf in leaves if not _is_split(leaf)),
        kv_values=attention.kv_values,
        kv_heads=attention.kv_heads,
        pair_flops=4 * attention.q_heads * attention.head_dim,
        window=attention.window,
        sums=1 if config.layer(layer).block in PARALLEL else 2,
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
