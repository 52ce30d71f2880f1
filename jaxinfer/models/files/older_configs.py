"""Configs in model directories that earlier versions wrote: their fields as this version has them."""

import math
from typing import Annotated, Any

import msgspec

from jaxinfer.models.config import MAX_LAYERS

_Fields = dict[str, Any]


class _OfLayers(msgspec.Struct):
    """The fields of a config by which layers could differ, each cycled over the layers."""

    attention: _Fields
    mlp: _Fields
    layers: int
    positions: _Fields = msgspec.field(default_factory=lambda: {"kind": "none"})
    layer_positions: tuple[_Fields, ...] = ()
    layer_mlps: tuple[_Fields, ...] = ()
    block: str = "sequential"


class _OfAttention(msgspec.Struct):
    """The fields of attention that have changed."""

    head_dim: int
    windows: Annotated[tuple[int | None, ...], msgspec.Meta(min_length=1)] = (None,)
    scale: float | None = None
    scale_by_inverse_layer: bool = False


def upgraded(kind: str, fields: _Fields) -> _Fields:
    """Bring the fields of a config up to date, whichever version wrote it.

    Args:
      kind: of the model, as `config.json` names it.
      fields: of its config, as `config.json` has them.
    Raises ValueError for values of the wrong type.
    """
    fields = _with_preprocessing(fields)
    if kind == "decoder" and "pattern" not in fields:
        return _with_pattern(fields)
    if kind in ("encoder", "vision_transformer") and "learned_positions" not in fields:
        return _with_one_kind(fields)
    return fields


def _with_preprocessing(fields: _Fields) -> _Fields:
    """Move the fields that ViTs had before `preprocessing` there."""
    moved = {"pixel_mean": "mean", "pixel_deviation": "deviation"}
    given = {moved[name]: value for name, value in fields.items() if name in moved}
    if not given:
        return fields
    kept = {name: value for name, value in fields.items() if name not in moved}
    return kept | {"preprocessing": kept.get("preprocessing", {}) | given}


def _with_pattern(fields: _Fields) -> _Fields:
    """Make `pattern` of the fields that were cycled over the layers of a decoder, each by itself."""
    old = msgspec.convert(fields, _OfLayers)
    attention = msgspec.convert(old.attention, _OfAttention)
    positions, mlps = old.layer_positions or (old.positions,), old.layer_mlps or (old.mlp,)
    length = max(1, min(old.layers, MAX_LAYERS))
    if not attention.scale_by_inverse_layer:
        length = min(length, math.lcm(len(attention.windows), len(positions), len(mlps)))
    pattern = [
        {
            "mixer": _attention(old.attention, attention, layer) | _positions(positions[layer % len(positions)]),
            "mlp": mlps[layer % len(mlps)],
            "block": old.block,
        }
        for layer in range(length)
    ]
    return _without_layers(fields) | {"pattern": pattern, "learned_positions": _learned(old.positions)}


def _with_one_kind(fields: _Fields) -> _Fields:
    """Bring the attention and the positions of an encoder or a ViT up to date."""
    if "positions" not in fields and "windows" not in msgspec.convert(fields.get("attention"), _Fields):
        return fields
    old = msgspec.convert(fields, _OfLayers)
    attention = _attention(old.attention, msgspec.convert(old.attention, _OfAttention), 0)
    kept = {name: value for name, value in fields.items() if name != "positions"}
    learned = {"learned_positions": _learned(old.positions)} if "positions" in fields else {}
    return kept | learned | {"attention": attention}


def _attention(fields: _Fields, old: _OfAttention, layer: int) -> _Fields:
    """The fields of the attention of one layer."""
    kept = {name: value for name, value in fields.items() if name not in ("windows", "scale_by_inverse_layer")}
    kept["window"] = old.windows[layer % len(old.windows)]
    if old.scale_by_inverse_layer:
        kept["scale"] = (old.head_dim**-0.5 if old.scale is None else old.scale) / (layer + 1)
    return kept


def _positions(old: _Fields) -> _Fields:
    """The field of attention with the positions that it goes by."""
    if old.get("kind") == "learned":
        return {}
    return {"positions": {name: value for name, value in old.items() if name != "offset"}}


def _learned(old: _Fields) -> _Fields | None:
    """The table of positions that is added to the embeddings, if there is one."""
    return {"offset": old.get("offset", 0)} if old.get("kind") == "learned" else None


def _without_layers(fields: _Fields) -> _Fields:
    """The fields that layers do not differ by."""
    moved = ("attention", "positions", "layer_positions", "mlp", "layer_mlps", "block")
    return {name: value for name, value in fields.items() if name not in moved}
