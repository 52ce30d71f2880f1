"""The supported Hugging Face families, one small file each.

Start at `mapping.py` (tensors) and `fields.py` (configs); docs/adding-a-family.md says how to add one. No file is
opened here.
"""

from collections.abc import Mapping

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import (
    bert,
    bloom,
    distilbert,
    gemma2,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    llama,
    mistral,
    opt,
    phi3,
    qwen2,
    qwen3,
    resnet,
    roberta,
    torchvision_resnet,
    yolov5,
)
from jaxinfer.models.families.mapping import Family, Shape, Source, plan

_MODULES = (
    *(gpt2, gpt_neo, gptj, gpt_neox, opt, bloom, llama, mistral, qwen2, qwen3, gemma2, phi3),
    *(bert, distilbert, roberta),
    resnet,
)
FAMILIES: dict[str, Family] = {
    model_type: module.FAMILY for module in _MODULES for model_type in module.FAMILY.model_types
}


STATE_DICTS: tuple[Family, ...] = (torchvision_resnet.FAMILY, yolov5.FAMILY)
"""The families whose checkpoints have no `config.json`."""


def family_of(hf_config: Mapping[str, object]) -> Family:
    """The family of a `config.json`, by its `model_type`."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not implemented; known: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def recognise(shapes: Mapping[str, Shape]) -> tuple[Family, ModelConfig] | None:
    """The family of a state dict and the config of its model, by names and shapes alone; None if it is of none."""
    for family in STATE_DICTS:
        plain = {family.plain_name(name): shape for name, shape in shapes.items()}
        if family.mark in plain:
            return family, family.config(plain)
    return None


__all__ = ["FAMILIES", "STATE_DICTS", "Family", "Source", "family_of", "plan", "recognise"]
