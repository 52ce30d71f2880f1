"""Hunyuan v1 with experts and an MLP for all tokens in every layer."""

import dataclasses
from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig, MoeConfig, RouterConfig
from jaxinfer.models.families import experts, hunyuan_v1_dense, llama
from jaxinfer.models.families.fields import Fields, refuse
from jaxinfer.models.families.mapping import Source

_NAMES = experts.ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp")


def _config(hf: Mapping[str, object]) -> DecoderConfig:
    config = hunyuan_v1_dense.config(hf)
    router = RouterConfig(experts=_of_all_layers(hf, "num_experts"), experts_per_token=_of_all_layers(hf, "moe_topk"))
    return experts.with_experts(config, MoeConfig(router=router, shared_hidden=config.layer(0).mlp.hidden))


def _of_all_layers(hf: Mapping[str, object], name: str) -> int:
    """A number of all layers, which may be written once for each."""
    if not isinstance(hf.get(name), list):
        return Fields(hf).integer(name, default=1)
    fields = Fields(hf)
    fields.per_layer(name, fields.integer("num_hidden_layers"))
    first, *others = fields.integers(name) or (1,)
    if any(other != first for other in others):
        refuse(f"config.json: {name} differs between layers, which is not implemented; choose another checkpoint.")
    return first


def _sources(config: DecoderConfig) -> dict[str, Source]:
    return experts.sources(config, _NAMES)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("hunyuan_v1_moe",),
    published=("Hunyuan A13B",),
    config=_config,
    sources=_sources,
    renamed=hunyuan_v1_dense.RENAMED,
)
