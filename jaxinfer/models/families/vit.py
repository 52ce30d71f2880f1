"""The vision transformer as `transformers` has it, and the parts that its relatives use too."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.models.config import AttentionConfig, MlpConfig, NormConfig, NormKind, ViTConfig
from jaxinfer.models.families.fields import Fields
from jaxinfer.models.families.mapping import (
    Family,
    Source,
    alternate_from_fused,
    by_kv_head,
    by_kv_head_from_fused,
    linear,
    norm,
    only,
    qkv_rows,
)
from jaxinfer.models.families.vision import labels_by_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of the parts of a ViT.

    Attributes:
      class_tokens: of each class token.
      registers: all in one tensor; empty: none.
      layers: what comes before the number of a layer; its parts follow.
      qkv: the projections of queries, keys and values, or a single one of all queries, all keys, all values.
      up: the MLP's first projection; if it is gated, of all gates, then all ups.
      scales: layer scale after attention, and after the MLP; empty: none.
      head: empty: the family has sources of its own for it.
    """

    class_tokens: tuple[str, ...] = ()
    registers: str = ""
    positions: str
    patches: str
    layers: str
    attention_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_norm: str
    up: str
    down: str
    scales: tuple[str, str] | tuple[()] = ()
    norm: str
    head: str


def vit_sources(config: ViTConfig, names: Names) -> dict[str, Source]:
    """The tensors of a ViT whose parts have these names."""
    embed, side = config.embed, config.patch_size
    grid_side = config.position_grid.side if config.position_grid else config.grid_side
    positions, tokens = config.class_tokens + grid_side**2, len(names.class_tokens)
    sources = {
        "patches.weight": Source((f"{names.patches}.weight",), ((embed, 3, side, side),), _by_pixel),
        "patches.bias": Source((f"{names.patches}.bias",), ((embed,),), only),
        "positions.table": Source((names.positions,), ((1, positions, embed),), _first),
    }
    if tokens:
        sources["class_token.table"] = Source(names.class_tokens, ((1, 1, embed),) * tokens, _rows)
    if config.registers:
        sources["registers.table"] = Source((names.registers,), ((1, config.registers, embed),), _first)
    for i in range(config.layers):
        sources |= _layer_sources(config, names, f"layers.{i}", f"{names.layers}.{i}")
    sources |= norm("norm", names.norm, embed, bias=True)
    if names.head and config.labels:
        sources |= linear("head", (names.head,), (len(config.labels),), config.feature_width, bias=True)
    return sources


def _layer_sources(config: ViTConfig, names: Names, ours: str, theirs: str) -> dict[str, Source]:
    attention, embed, hidden = config.attention, config.embed, config.mlp.hidden
    width, rows, join = attention.q_heads * attention.head_dim, qkv_rows(attention), by_kv_head(attention)
    if len(names.qkv) == 1:
        rows, join = (sum(rows),), by_kv_head_from_fused(attention)
    qkv = tuple(f"{theirs}.{name}" for name in names.qkv)
    gate_up, combine = (2 * hidden, alternate_from_fused) if config.mlp.gated else (hidden, only)
    last = (("attention.out", names.out, width), ("mlp.down", names.down, hidden))
    sources = (
        norm(f"{ours}.attention_norm", f"{theirs}.{names.attention_norm}", embed, bias=True)
        | linear(f"{ours}.attention.qkv", qkv, rows, embed, bias=attention.qkv_bias, combine=join)
        | norm(f"{ours}.mlp_norm", f"{theirs}.{names.mlp_norm}", embed, bias=True)
        | linear(f"{ours}.mlp.gate_up", (f"{theirs}.{names.up}",), (gate_up,), embed, bias=True, combine=combine)
    )
    for place, (leaf, name, inputs) in enumerate(last):
        sources |= linear(f"{ours}.{leaf}", (f"{theirs}.{name}",), (embed,), inputs, bias=True)
        if names.scales:
            scale = f"{theirs}.{names.scales[place]}"
            sources |= {
                part: _scaled(sources[part], scale) for part in (f"{ours}.{leaf}.weight", f"{ours}.{leaf}.bias")
            }
    return sources


def _scaled(source: Source, scale: str) -> Source:
    """Multiply the outputs of a linear by layer scale (arXiv:2103.17239, eq. 4), in float32."""

    def combine(array: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return (array.astype(np.float32).T * scale.astype(np.float32)).T

    rows = source.shapes[0][:1]
    return Source((*source.names, scale), (*source.shapes, rows), combine)


def _by_pixel(weight: np.ndarray) -> np.ndarray:
    """[D, colour, row, column] -> [D, inputs]: pixels row by row, each red, green and blue."""
    return weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)


def _first(table: np.ndarray) -> np.ndarray:
    """[1, rows, D] -> [rows, D]."""
    return table[0]


def _rows(*tokens: np.ndarray) -> np.ndarray:
    """[1, 1, D] each -> [tokens, D]."""
    return np.concatenate(tokens)[:, 0]


def vit_config(
    fields: Fields, *, patch_size: int = 16, eps: float, mlp: MlpConfig | None = None, **ours: Any
) -> ViTConfig:
    """The config of a ViT by the fields that its relatives have in common.

    Args:
      patch_size, eps: the family's defaults.
      mlp: None: by `intermediate_size` and `hidden_act`.
      ours: fields of `ViTConfig`.
    """
    fields.expect("num_channels", 3)
    embed, heads = fields.integer("hidden_size", default=768), fields.integer("num_attention_heads", default=12)
    return ViTConfig(
        embed=embed,
        layers=fields.integer("num_hidden_layers", default=12),
        image_size=fields.side("image_size", default=224),
        patch_size=fields.side("patch_size", default=patch_size),
        attention=AttentionConfig(
            q_heads=heads,
            kv_heads=heads,
            head_dim=fields.optional(int, "head_dim") or fields.head_dim(embed, heads),
            qkv_bias=fields.flag("qkv_bias", default=True),
            out_bias=True,
        ),
        mlp=mlp
        or MlpConfig(
            hidden=fields.integer("intermediate_size", default=3072),
            activation=fields.activation("hidden_act", default="gelu"),
            bias=True,
        ),
        norm=NormConfig(kind=NormKind.LAYER, eps=fields.number("layer_norm_eps", default=eps)),
        **ours,
    )


def _config(hf: Mapping[str, object]) -> ViTConfig:
    fields = Fields(hf)
    return vit_config(fields, eps=1e-12, labels=labels_by_head(fields, ("ViTForImageClassification",), ("ViTModel",)))


NAMES = Names(
    class_tokens=("embeddings.cls_token",),
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

PROJECTIONS = (
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
)
RENAMED = (  # what checkpoints have; transformers 5 has the names above in memory
    ("encoder.layer.", "layers."),
    *PROJECTIONS,
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
)

FAMILY = Family(
    model_types=("vit",),
    published=("ViT",),
    config=_config,
    sources=lambda config: vit_sources(config, NAMES),
    prefixes=("vit.",),
    ignored=r"pooler\..*|embeddings\.mask_token",  # of other heads
    renamed=RENAMED,
    image_processor="ViT",
)
