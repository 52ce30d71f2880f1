"""The supported Hugging Face families, one small file each.

Start at `mapping.py` (tensors) and `fields.py` (configs); docs/adding-a-family.md says how to add one. No file is
opened here.
"""

import dataclasses
from collections.abc import Collection, Mapping

from jaxinfer.models.config import ModelConfig, ViTConfig
from jaxinfer.models.families import (
    afmoe,
    apertus,
    arcee,
    bert,
    bloom,
    cohere,
    cohere2,
    cwm,
    deit,
    dinov2,
    distilbert,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gemma3_text,
    gemma4,
    gemma4_text,
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
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    hy_v3,
    internlm3,
    llama,
    mellum,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    nemotron,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    resnet,
    roberta,
    seed_oss,
    siglip,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    timm_vit,
    torchvision_resnet,
    vaultgemma,
    vit,
    yolov5,
)
from jaxinfer.models.families.mapping import Family, Shape, Source, listed, plan

_MODULES = (
    *(gpt2, gpt_neo, gptj, gpt_neox, opt, bloom, llama, mistral, qwen2, qwen3, gemma2, phi3),
    *(gemma3, gemma3_text, gemma4, gemma4_text, olmo2, olmo3, granite, smollm3, cohere, cohere2),
    *(phi, starcoder2, falcon, glm, glm4, stablelm, mistral3),
    *(gemma, seed_oss, ernie4_5, exaone4, ministral, qwen3_vl, qwen2_5_vl, qwen3_5, vaultgemma, cwm, internlm3),
    *(arcee, nemotron, apertus, ministral3, hunyuan_v1_dense, olmo_hybrid),
    *(mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe, granitemoeshared, glm4_moe, dots1, minimax_m2),
    *(exaone_moe, hy_v3, ernie4_5_moe, mellum, solar_open, hunyuan_v1_moe, afmoe, qwen3_5_moe, qwen3_next),
    *(bert, distilbert, roberta),
    *(resnet, vit, deit, dinov2, siglip),
)
FAMILIES: dict[str, Family] = {
    model_type: module.FAMILY for module in _MODULES for model_type in module.FAMILY.model_types
}


STATE_DICTS: tuple[Family, ...] = (timm_vit.FAMILY, torchvision_resnet.FAMILY, yolov5.FAMILY)
"""The families whose checkpoints have no `config.json`, or one that says little."""


_LATENT, _INDEXED = "multi-head latent attention", "attention to the tokens that an indexer chooses"
_SINKS, _STATES = "attention sinks", "state-space layers (Mamba-2)"
_STREAMS, _DECAYS = "several residual streams", "a delta rule whose decay differs between features"
_CLAMPED = "the activation that swiglu_limit clamps"
REFUSED = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "sarvam_mla", "youtu", "kimi_k25"), (_LATENT,)
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "mistral_large4"), (_LATENT, _INDEXED)),
    "longcat_flash": (_LATENT, "layers of two attentions and two MLPs", "experts that return their input"),
    "kimi_linear": (_LATENT, _DECAYS),
    "glm5_next": (_LATENT, _INDEXED, _DECAYS),
    "hy_v4": (_INDEXED, _STREAMS),
    "minimax_m3_vl": ("attention to the blocks that an indexer chooses", _CLAMPED),
    "deepseek_v4": ("attention to compressed keys and values", _STREAMS),
    "qwen4_exp": (_STREAMS, "layer inputs from tables of n-grams"),
    "qwen3_vl_moe": ("experts whose matrices are [inputs, outputs]",),
    "gpt_oss": (
        _SINKS,
        "a router with biases",
        "experts with biases whose matrices are [inputs, outputs], gate and up alternating",
        _CLAMPED,
        "weights in mxfp4",
    ),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), (_SINKS,)),
    "mimo_v2_flash": (_SINKS, "values that are narrower than keys"),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), (_STREAMS, "MLPs whose gates are sparse")),
    **dict.fromkeys(("llama4", "llama4_text"), ("attention inside of blocks", "experts whose inputs are scaled")),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("layers of short convolutions",)),
    **dict.fromkeys(("bamba", "granitemoehybrid", "mamba2", "zamba2"), (_STATES,)),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), ("state-space layers (Mamba)",)),
    "nemotron_h": (_STATES, "layers of one mixer or one MLP"),
    "falcon_h1": (_STATES, "state-space layers beside attention"),
    "minimax": ("linear attention with a fixed decay",),
    "recurrent_gemma": ("recurrent layers (RG-LRU)",),
    **dict.fromkeys(("rwkv", "xlstm"), ("recurrent layers of their own",)),
    "blt": ("patches of bytes",),
    "dory": ("layers that run several times",),
    "phimoe": ("a router that masks by sparsemixer",),
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


_FOREIGN = {
    "conv_proj.weight": "ViT of torchvision",
    "features.0.0.weight": "EfficientNet, ConvNeXt or MobileNet of torchvision",
    "features.0.weight": "VGG or AlexNet of torchvision",
    "features.conv0.weight": "DenseNet of torchvision",
    "conv_stem.weight": "EfficientNet or MobileNet of timm",
    "2.cv1.conv.weight": "a YOLO of another version, or with four grids",
}
"""State dicts that are known and not implemented, by the end of a tensor's name."""


def recognise(shapes: Mapping[str, Shape]) -> tuple[Family, ModelConfig] | None:
    """The family of a state dict and its model's config, by names and shapes alone; None if it is of none.

    All names may begin with what wrapping classes put before them, such as `module.` or `model.`: the family's prefix.
    Raises ValueError for tensors of several models, and for a config that is not implemented.
    """
    for family in STATE_DICTS:
        if (prefix := _prefix(family, shapes)) is not None:
            family = dataclasses.replace(family, prefixes=(prefix,))
            return family, family.config({family.plain_name(name): shape for name, shape in shapes.items()})
    return None


def _prefix(family: Family, names: Collection[str]) -> str | None:
    """Return what all names have before those of the family; None if the tensors are not of this family."""
    prefixes = [name.removesuffix(family.mark) for name in names if f".{name}".endswith(f".{family.mark}")]
    outer = sorted(x for x in prefixes if not any(x != other and x.startswith(other) for other in prefixes))
    if not outer:
        return None
    (prefix, *more), model = outer, family.published[0]
    if more:
        raise ValueError(
            f"The tensors are of {len(outer)} models ({model}), which begin with {listed(outer)}; save those of one."
        )
    if others := sorted(name for name in names if not name.startswith(prefix)):
        raise ValueError(
            f"The tensors of a model ({model}) begin with {prefix!r}, but {listed(others)} do not; save the model's "
            f"alone: {{name: tensor for name, tensor in state_dict.items() if name.startswith({prefix!r})}}."
        )
    return prefix


def describe_unknown(names: Collection[str]) -> str:
    """Return an error message about a state dict that is of no family."""
    known = ", ".join(name for family in STATE_DICTS for name in family.published)
    for mark, what in _FOREIGN.items():
        if any(f".{name}".endswith(f".{mark}") for name in names):
            return f"The tensors are those of {what}, which is not implemented; known state dicts: {known}."
    first = ", ".join([*names][:3])
    return (
        f"No config.json, and the tensors ({first}, ...) are of no known state dict ({known}). For a Hugging Face "
        "model name its folder, with config.json in it."
    )


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


__all__ = [
    "FAMILIES",
    "STATE_DICTS",
    "Family",
    "Source",
    "describe_unknown",
    "family_of",
    "family_of_timm",
    "is_timm",
    "plan",
    "recognise",
]
