"""The supported Hugging Face families, one small file each.

Start at `mapping.py` (tensors) and `fields.py` (configs); docs/adding-a-family.md says how to add one. No file is
opened here.
"""

from collections.abc import Mapping

from jaxinfer.models.config import ModelConfig, ViTConfig
from jaxinfer.models.families import (
    bert,
    bloom,
    cohere,
    cohere2,
    deit,
    dinov2,
    distilbert,
    dots1,
    falcon,
    gemma2,
    gemma3,
    gemma3_text,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    granite,
    granitemoe,
    granitemoeshared,
    llama,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    resnet,
    roberta,
    siglip,
    smollm3,
    stablelm,
    starcoder2,
    timm_vit,
    torchvision_resnet,
    vit,
    yolov5,
)
from jaxinfer.models.families.mapping import Family, Shape, Source, plan

_MODULES = (
    *(gpt2, gpt_neo, gptj, gpt_neox, opt, bloom, llama, mistral, qwen2, qwen3, gemma2, phi3),
    *(gemma3, gemma3_text, olmo2, olmo3, granite, smollm3, cohere, cohere2),
    *(phi, starcoder2, falcon, glm, glm4, stablelm, mistral3),
    *(mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe, granitemoeshared, glm4_moe, dots1),
    *(bert, distilbert, roberta),
    *(resnet, vit, deit, dinov2, siglip),
)
FAMILIES: dict[str, Family] = {
    model_type: module.FAMILY for module in _MODULES for model_type in module.FAMILY.model_types
}


STATE_DICTS: tuple[Family, ...] = (timm_vit.FAMILY, torchvision_resnet.FAMILY, yolov5.FAMILY)
"""The families whose checkpoints have no `config.json`, or one that says little."""


REFUSED = {
    "deepseek_v2": ("multi-head latent attention",),
    "deepseek_v3": ("multi-head latent attention",),
    "gpt_oss": (
        "attention sinks",
        "a router with biases",
        "experts with biases whose matrices are [inputs, outputs], gate and up alternating",
        "the activation that swiglu_limit clamps",
        "weights in mxfp4",
    ),
}
"""Families that are known and not implemented, and what they need that is missing."""


def family_of(hf_config: Mapping[str, object]) -> Family:
    """The family of a `config.json`, by its `model_type`."""
    model_type = hf_config.get("model_type")
    if isinstance(model_type, str) and (missing := REFUSED.get(model_type)):
        raise ValueError(f"config.json: model_type={model_type!r} is not implemented; missing: {', '.join(missing)}.")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not implemented; known: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def recognise(shapes: Mapping[str, Shape]) -> tuple[Family, ModelConfig] | None:
    """The family of a state dict and its model's config, by names and shapes alone; None if it is of none."""
    for family in STATE_DICTS:
        plain = {family.plain_name(name): shape for name, shape in shapes.items()}
        if family.mark in plain:
            return family, family.config(plain)
    return None


def is_timm(hf_config: Mapping[str, object]) -> bool:
    """Return whether a `config.json` is of a timm directory."""
    return timm_vit.ARCHITECTURE in hf_config and "model_type" not in hf_config


def family_of_timm(hf_config: Mapping[str, object], shapes: Mapping[str, Shape]) -> tuple[Family, ModelConfig]:
    """The family of a timm directory and the config of its model."""
    recognised = recognise(shapes)
    if recognised is None or not isinstance(recognised[1], ViTConfig):
        raise ValueError(
            f"config.json: {timm_vit.ARCHITECTURE}={hf_config[timm_vit.ARCHITECTURE]!r} is not implemented; of timm's "
            "models vit_* and deit_* are."
        )
    return recognised[0], timm_vit.with_directory(recognised[1], hf_config)


__all__ = ["FAMILIES", "STATE_DICTS", "Family", "Source", "family_of", "family_of_timm", "is_timm", "plan", "recognise"]
