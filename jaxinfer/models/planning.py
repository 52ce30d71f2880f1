"""The planner's shape of a decoder, from its config."""

import collections

from jaxinfer.models.config import DecoderConfig, MlpConfig
from jaxinfer.sharding.planner import LayerShape, ModelShape


def shape_of(name: str, config: DecoderConfig) -> ModelShape:
    """Return what the planner needs to know of a model: windows, shared MLPs and experts of each kind of layer.

    name: what errors and tables call it.
    """
    kinds = collections.Counter(
        (config.mlp_in(layer), config.attention.window(layer)) for layer in range(config.layers)
    )
    return ModelShape(
        name=name,
        hidden=config.output_width,
        vocab=config.vocab,
        heads=config.attention.q_heads,
        tied=config.tied,
        layers=tuple(_layer(config, mlp, window, count) for (mlp, window), count in kinds.items()),
    )


def _layer(config: DecoderConfig, mlp: MlpConfig, window: int | None, count: int) -> LayerShape:
    attention, width = config.attention, (3 if mlp.gated else 2) * config.embed
    params = 2 * config.embed * attention.head_dim * (attention.q_heads + attention.kv_heads)
    sizes = {
        "count": count,
        "kv_values": 2 * attention.kv_heads * attention.head_dim,
        "kv_heads": attention.kv_heads,
        "pair_flops": 4 * attention.q_heads * attention.head_dim,
    }
    if mlp.moe is None:
        return LayerShape(params=params + width * mlp.hidden, window=window, **sizes)
    router = mlp.moe.router
    return LayerShape(
        params=params + width * mlp.moe.shared_hidden + config.embed * router.experts,
        window=window,
        experts=router.experts,
        chosen=router.experts_per_token,
        expert_params=width * mlp.hidden,
        **sizes,
    )
