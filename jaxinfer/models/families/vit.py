"""The vision transformer as `transformers` has it, and the parts that timm's uses too."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfer.models.config import AttentionConfig, MlpConfig, NormConfig, NormKind, ViTConfig
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import (
    Family,
    Source,
    by_kv_head,
    by_kv_head_from_fused,
    linear,
    norm,
    only,
    qkv_rows,
)
from jaxinfer.models.families.vision import labels_of

PREPROCESSOR = "preprocessor_config.json"
"""The file beside `config.json` that says how images become pixels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of the parts of a ViT.

    Attributes:
      layers: what comes before the number of a layer; its parts follow.
      qkv: the projections of queries, keys and values, or a single one of all queries, all keys, all values.
    """

    class_token: str
    positions: str
    patches: str
    layers: str
    attention_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_norm: str
    up: str
    down: str
    norm: str
    head: str


def vit_sources(config: ViTConfig, names: Names) -> dict[str, Source]:
    """Return the tensors of a ViT whose parts have these names."""
    attention, embed, hidden, side = config.attention, config.embed, config.mlp.hidden, config.patch_size
    width, rows, join = attention.q_heads * attention.head_dim, qkv_rows(attention), by_kv_head(attention)
    if len(names.qkv) == 1:
        rows, join = (sum(rows),), by_kv_head_from_fused(attention)
    sources = {
        "patches.weight": Source((f"{names.patches}.weight",), ((embed, 3, side, side),), _by_pixel),
        "patches.bias": Source((f"{names.patches}.bias",), ((embed,),), only),
        "class_token.table": Source((names.class_token,), ((1, 1, embed),), _first),
        "positions.table": Source((names.positions,), ((1, config.tokens, embed),), _first),
    }
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"{names.layers}.{i}"
        qkv = tuple(f"{theirs}.{name}" for name in names.qkv)
        sources |= (
            norm(f"{ours}.attention_norm", f"{theirs}.{names.attention_norm}", embed, bias=True)
            | linear(f"{ours}.attention.qkv", qkv, rows, embed, bias=attention.qkv_bias, combine=join)
            | linear(f"{ours}.attention.out", (f"{theirs}.{names.out}",), (embed,), width, bias=True)
            | norm(f"{ours}.mlp_norm", f"{theirs}.{names.mlp_norm}", embed, bias=True)
            | linear(f"{ours}.mlp.gate_up", (f"{theirs}.{names.up}",), (hidden,), embed, bias=True)
            | linear(f"{ours}.mlp.down", (f"{theirs}.{names.down}",), (embed,), hidden, bias=True)
        )
    return (
        sources
        | norm("norm", names.norm, embed, bias=True)
        | linear("head", (names.head,), (len(config.labels),), embed, bias=True)
    )


def _by_pixel(weight: np.ndarray) -> np.ndarray:
    """[D, colour, row, column] -> [D, inputs]: pixels row by row, each red, green and blue."""
    return weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)


def _first(table: np.ndarray) -> np.ndarray:
    """[1, rows, D] -> [rows, D]."""
    return table[0]


def _config(hf: Mapping[str, object]) -> ViTConfig:
    fields = Fields(hf)
    classifier = "ViTForImageClassification"
    if classifier not in (classes := fields.optional(list, "architectures") or [classifier]):
        raise ValueError(
            f"config.json: architectures={classes!r} has no head of classes; use a checkpoint of {classifier}."
        )
    fields.expect("num_channels", 3)
    fields.expect("problem_type", "single_label_classification")
    embed, heads = fields.integer("hidden_size", default=768), fields.integer("num_attention_heads", default=12)
    return ViTConfig(
        labels=labels_of(fields),
        embed=embed,
        layers=fields.integer("num_hidden_layers", default=12),
        image_size=fields.side("image_size", default=224),
        patch_size=fields.side("patch_size", default=16),
        attention=AttentionConfig(
            q_heads=heads,
            kv_heads=heads,
            head_dim=fields.optional(int, "head_dim") or fields.head_dim(embed, heads),
            qkv_bias=fields.flag("qkv_bias", default=True),
            out_bias=True,
        ),
        mlp=MlpConfig(
            hidden=fields.integer("intermediate_size", default=3072),
            activation=fields.activation("hidden_act", default="gelu"),
            bias=True,
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_eps", default=1e-12)),
    )


def with_preprocessor(config: ViTConfig, preprocessor: Mapping[str, object]) -> ViTConfig:
    """Return the config with what `preprocessor_config.json` says of pixels.

    How it resizes is ignored: ours is bilinear to a square (`models/images.py`). Raises ValueError if it makes images
    of another size, or scales other than to [0, 1].
    """
    fields = Fields(preprocessor, PREPROCESSOR)
    fields.expect("do_rescale", True)
    factor = fields.number("rescale_factor", default=1 / 255)
    if abs(255 * factor - 1) > 1e-6:
        raise ValueError(f"{PREPROCESSOR}: rescale_factor={factor!r} is not implemented, only 1 / 255.")
    _check_size(fields, config)
    if not fields.flag("do_normalize", default=True):
        return dataclasses.replace(config, pixel_mean=(0.0,) * 3, pixel_deviation=(1.0,) * 3)
    return dataclasses.replace(
        config,
        pixel_mean=fields.colours("image_mean") or config.pixel_mean,
        pixel_deviation=fields.colours("image_std") or config.pixel_deviation,
    )


def _check_size(fields: Fields, config: ViTConfig) -> None:
    if not fields.flag("do_resize", default=True):
        return
    name = "crop_size" if fields.flag("do_center_crop", default=False) else "size"
    value = fields.values.get(name)
    sides = set(value.values()) if isinstance(value, dict) else {value}  # height and width, or the shortest edge
    if sides - {None, config.image_size}:
        raise ValueError(
            f"{PREPROCESSOR}: {name}={value!r} does not fit images of {config.image_size} pixels in config.json; "
            "use the files of the same checkpoint."
        )


_NAMES = Names(
    class_token="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    patches="embeddings.patch_embeddings.projection",
    layers="layers",
    attention_norm="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    mlp_norm="layernorm_after",
    up="mlp.fc1",
    down="mlp.fc2",
    norm="layernorm",
    head="classifier",
)

FAMILY = Family(
    model_types=("vit",),
    config=_config,
    sources=lambda config: vit_sources(config, _NAMES),
    prefixes=("vit.",),
    ignored=r"pooler\..*|embeddings\.mask_token",  # of other heads
    renamed=(  # what checkpoints have; transformers 5 has the names above in memory
        ("encoder.layer.", "layers."),
        ("attention.attention.query", "attention.q_proj"),
        ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
    ),
)
