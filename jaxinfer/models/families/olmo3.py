"""OLMo 3: OLMo 2 with a window in three of four layers, whose positions are not scaled."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import olmo2
from jaxinfer.models.families.fields import Fields


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    fields = Fields({"sliding_window": 4096} | dict(hf))
    config = olmo2.base_config({**hf, "rope_parameters": None, "rope_scaling": None})
    theta = fields.number("rope_theta", default=500_000.0)
    positions = fields.rotary_by_layer_type(
        config.layer(0).attention.head_dim, full_theta=theta, sliding_theta=theta, sliding_names=("rope_theta",)
    )
    default = fields.every_nth_full(config.layers, default=4)
    config = config.with_positions([positions[kind] for kind in fields.layer_types(default)])
    return config.with_windows(fields.windows(fields.optional(int, "sliding_window"), default))


FAMILY = dataclasses.replace(olmo2.FAMILY, model_types=("olmo3",), published=("OLMo 3",), config=_config)
