"""timm's vision transformer (vit_*, deit_*): a state dict, alone or in a directory of timm's.

Such a directory has a `config.json` without `model_type`. A state dict alone does not say how pixels are normalised,
so 0.5 is taken for mean and deviation, which is right for most of Google's weights.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    ImagePooling,
    MlpConfig,
    NormConfig,
    NormKind,
    PreprocessingConfig,
    Resampling,
    ViTConfig,
)
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import Family, Shape, Source
from jaxinfer.models.families.vision import count, numbered, outputs_of
from jaxinfer.models.families.vit import Names, vit_sources

ARCHITECTURE = "architecture"
"""The field of a timm directory's `config.json` that names the model."""

_NOT_IMPLEMENTED = {
    "dist_token": "the distillation token of a distilled DeiT",
    "reg_token": "register tokens",
    "blocks.0.ls1.gamma": "layer scale",
    "blocks.0.attn.q_norm.weight": "normalised queries and keys",
    "norm_pre.weight": "a norm before the first layer",
    "attn_pool.latent": "pooling by attention",
}
_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # by width; others have heads of 64 features
_CROP_SHARE = 0.875  # of a directory that does not say
_POOLING = {"token": ImagePooling.CLS, "avg": ImagePooling.MEAN}


def _config(shapes: Mapping[str, Shape]) -> ViTConfig:
    for name, what in _NOT_IMPLEMENTED.items():
        if name in shapes:
            raise ValueError(f"The tensor {name} is of a ViT with {what}, which is not implemented.")
    for name, what in (("cls_token", "a class token"), ("pos_embed", "learned positions")):
        if name not in shapes:
            raise ValueError(f"The tensor {name} is missing; a ViT without {what} is not implemented.")
    embed, heads = shapes["cls_token"][-1], _heads(shapes["cls_token"][-1])
    patch_size, patches = _grid(shapes)
    return ViTConfig(
        labels=numbered(outputs_of(shapes, "head.weight")),
        embed=embed,
        layers=count(shapes, "blocks.", ".norm1.weight"),
        image_size=patch_size * patches,
        patch_size=patch_size,
        pooling=ImagePooling.MEAN if "fc_norm.weight" in shapes else ImagePooling.CLS,
        attention=AttentionConfig(
            q_heads=heads,
            kv_heads=heads,
            head_dim=embed // heads,
            qkv_bias="blocks.0.attn.qkv.bias" in shapes,
            out_bias=True,
        ),
        mlp=MlpConfig(hidden=outputs_of(shapes, "blocks.0.mlp.fc1.weight"), activation=Activation.GELU, bias=True),
        norm=NormConfig(kind=NormKind.LAYER, eps=1e-6),
    )


def _heads(embed: int) -> int:
    if embed not in _HEADS and embed % 64:
        raise ValueError(f"A width of {embed} does not say how many heads there are; only multiples of 64 do.")
    return _HEADS.get(embed, embed // 64)


def _grid(shapes: Mapping[str, Shape]) -> tuple[int, int]:
    """The pixels of a patch's side, and the patches of an image's."""
    patch, rows = shapes.get("patch_embed.proj.weight", ()), shapes["pos_embed"][-2]
    side = math.isqrt(max(0, rows - 1))
    if len(patch) != 4 or patch[2] != patch[3] or side * side != rows - 1 or side == 0:
        raise ValueError(
            f"The tensors patch_embed.proj.weight {list(patch)} and pos_embed {list(shapes['pos_embed'])} are of no "
            "square image with a class token, the only kind that is implemented."
        )
    return patch[3], side


def with_directory(config: ViTConfig, hf: Mapping[str, object]) -> ViTConfig:
    """Return the config with what a timm directory's `config.json` says. Raises ValueError for the rest."""
    fields = Fields(hf)
    pretrained = Fields(fields.optional(dict, "pretrained_cfg") or hf)  # older directories have all in one
    arguments = Fields(fields.optional(dict, "model_args") or {})
    classes, pooling = fields.optional(int, "num_classes"), fields.optional(str, "global_pool")
    if classes not in (None, len(config.labels)):
        raise ValueError(f"config.json: num_classes={classes} does not fit the head of {len(config.labels)} classes.")
    if pooling is not None and _POOLING.get(pooling) is not config.pooling:
        raise ValueError(
            f"config.json: global_pool={pooling!r} is not implemented for these tensors: token needs the tensor "
            "norm.weight, avg the tensor fc_norm.weight."
        )
    colours, *sides = pretrained.optional(list, "input_size") or [3]
    if colours != 3 or len(set(sides)) > 1:
        raise ValueError(f"config.json: input_size={[colours, *sides]} is not implemented, only squares of 3 colours.")
    heads = arguments.optional(int, "num_heads") or config.attention.q_heads
    head_dim = fields.head_dim(config.embed, heads)
    return dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, q_heads=heads, kv_heads=heads, head_dim=head_dim),
        preprocessing=_preprocessing(pretrained, config),
    )


def _preprocessing(pretrained: Fields, config: ViTConfig) -> PreprocessingConfig:
    """Return how timm evaluates: the shorter side is resized, or with "squash" both, and the middle is cropped."""
    interpolation = pretrained.optional(str, "interpolation") or Resampling.BICUBIC
    mode = pretrained.optional(str, "crop_mode") or "center"
    for name, value, known in (
        ("interpolation", interpolation, ("bilinear", "bicubic", "lanczos")),
        ("crop_mode", mode, ("center", "squash")),
    ):
        if value not in known:
            raise ValueError(f"config.json: {name}={value!r} is not implemented; known: {', '.join(known)}.")
    share = pretrained.number("crop_pct", default=_CROP_SHARE)
    if not 0 < share <= 1:
        raise ValueError(f"config.json: crop_pct={share} must be in (0, 1]; correct it.")
    return PreprocessingConfig(
        resampling=Resampling(interpolation),
        resized=math.floor(config.image_size / share),
        keep_ratio=mode == "center",
        mean=pretrained.colours("mean") or config.preprocessing.mean,
        deviation=pretrained.colours("std") or config.preprocessing.deviation,
    )


def _sources(config: ViTConfig) -> dict[str, Source]:
    last = "fc_norm" if config.pooling is ImagePooling.MEAN else "norm"
    return vit_sources(config, dataclasses.replace(_NAMES, norm=last))


_NAMES = Names(
    class_tokens=("cls_token",),
    positions="pos_embed",
    patches="patch_embed.proj",
    layers="blocks",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    out="attn.proj",
    mlp_norm="norm2",
    up="mlp.fc1",
    down="mlp.fc2",
    norm="norm",
    head="head",
)

FAMILY = Family(
    model_types=("timm_vit",),
    published=("ViT and DeiT of timm",),
    config=_config,
    sources=_sources,
    image_processor="ViT",
    mark="blocks.0.attn.qkv.weight",
)
