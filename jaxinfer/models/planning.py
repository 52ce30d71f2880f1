"""The planner's shape of a decoder, from its config."""

import collections
import dataclasses
import math

from jaxinfer.models.config import DecoderConfig, LayerConfig
from jaxinfer.sharding.planner import LayerShape, ModelShape


def shape_of(name: str, config: DecoderConfig) -> ModelShape:
    """Return what the planner needs to know of a model: windows, shared MLPs and experts of each kind of layer.

    name: what errors and tables call it.
    """
    counts = collections.Counter(_layer(config, config.layer(layer)) for layer in range(config.layers))
    return ModelShape(
        name=name,
        hidden=config.output_width,
        vocab=config.vocab,
        heads=math.gcd(*(kind.mixer.q_heads for kind in config.pattern)),
        tied=config.tied,
        layers=tuple(dataclasses.replace(layer, count=count) for layer, count in counts.items()),
    )


def _layer(config: DecoderConfig, kind: LayerConfig) -> LayerShape:
    attention, mlp = kind.mixer, kind.mlp
    width = (3 if mlp.gated else 2) * config.embed
    heads = 2 * (attention.q_heads + attention.kv_heads) + attention.q_heads * attention.output_gate
    params = config.embed * attention.head_dim * heads
    sizes = {
        "count": 1,
        "kv_values": attention.kv_values,
        "kv_heads": attention.kv_heads,
        "pair_flops": 4 * attention.q_heads * attention.head_dim,
    }
    if mlp.moe is None:
        return LayerShape(params=params + width * mlp.hidden, window=attention.window, **sizes)
    router = mlp.moe.router
    return LayerShape(
        params=params + width * mlp.moe.shared_hidden + config.embed * router.experts,
        window=attention.window,
        experts=router.experts,
        chosen=router.experts_per_token,
        expert_params=width * mlp.hidden,
        **sizes,
    )
