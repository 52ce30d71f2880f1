"""Model directories that earlier versions wrote are read as if this version had written them."""

import dataclasses
import json
import re

import pytest

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    BlockKind,
    DecoderConfig,
    EncoderConfig,
    LayerConfig,
    LearnedPositions,
    MlpConfig,
    MoeConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
    RouterConfig,
    ViTConfig,
)
from jaxinfer.models.files.description import Description

HEADS = {"q_heads": 4, "kv_heads": 4, "head_dim": 4}
ATTENTION = AttentionConfig(**HEADS)
MLP, NORM = MlpConfig(hidden=8, activation=Activation.GELU), NormConfig(kind=NormKind.LAYER)
EXPERTS = dataclasses.replace(MLP, moe=MoeConfig(router=RouterConfig(experts=4, experts_per_token=2)))
ROTARY = PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=4)
OLD_MLP, OLD_NORM = {"hidden": 8, "activation": "gelu"}, {"kind": "layer"}
OLD_EXPERTS = OLD_MLP | {"moe": {"router": {"experts": 4, "experts_per_token": 2}}}
OLD_ROTARY = {"kind": "rotary", "offset": 0, "theta": 10_000.0, "rotary_dim": 4, "scaling": None}
OLD_NONE, OLD_TABLE = OLD_ROTARY | {"kind": "none"}, OLD_ROTARY | {"kind": "learned", "offset": 2}
SIZES = {"vocab": 8, "embed": 16, "layers": 3, "context": 8}
DECODER = DecoderConfig(**SIZES, norm=NORM, pattern=(LayerConfig(mixer=ATTENTION, mlp=MLP),))
IMAGES = {"embed": 16, "layers": 3, "labels": ["a"], "image_size": 16, "patch_size": 8}


def old(**fields):
    """What an earlier version wrote of a config."""
    attention = HEADS | {"windows": [None], "scale": None, "scale_by_inverse_layer": False}
    return {"norm": OLD_NORM, "mlp": OLD_MLP, "attention": attention | fields.pop("attention", {})} | fields


CASES = {
    "windows, positions and experts": (
        old(
            **SIZES,
            attention={"windows": [4, None]},
            positions=OLD_ROTARY,
            layer_positions=[OLD_ROTARY, OLD_NONE],
            layer_mlps=[OLD_MLP, OLD_EXPERTS, OLD_EXPERTS],
            block="sandwich",
        ),
        DECODER.with_block(BlockKind.SANDWICH)
        .with_windows((4, None))
        .with_positions((ROTARY, dataclasses.replace(ROTARY, kind=PositionKind.NONE)))
        .with_mlps((MLP, EXPERTS, EXPERTS)),
    ),
    "scores by the layer": (
        old(**SIZES, attention={"scale_by_inverse_layer": True}, positions=OLD_TABLE),
        dataclasses.replace(DECODER, learned_positions=LearnedPositions(offset=2)).vary(
            lambda kind, scale: kind.with_attention(scale=scale), (0.5, 0.25, 0.5 / 3)
        ),
    ),
    "an encoder": (
        old(**SIZES, positions=OLD_TABLE, token_types=2),
        EncoderConfig(
            **SIZES,
            norm=NORM,
            attention=ATTENTION,
            mlp=MLP,
            learned_positions=LearnedPositions(offset=2),
            token_types=2,
        ),
    ),
    "a vision transformer": (
        old(**IMAGES),
        ViTConfig(**IMAGES | {"labels": ("a",)}, norm=NORM, attention=ATTENTION, mlp=MLP),
    ),
}


def write(folder, config, fields):
    """Write a model directory's `config.json` with the fields of an earlier version."""
    new = json.loads(Description(family="old", config=config).to_json())
    (folder / "config.json").write_text(json.dumps(new | {"config": fields}))


@pytest.mark.parametrize("case", CASES)
def test_an_earlier_version_s_config(case, tmp_path):
    fields, expected = CASES[case]
    write(tmp_path, expected, fields)
    assert Description.read(tmp_path).config == expected


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"windows": []}, r"Expected `array` of length >= 1.*windows"),
        ({"windows": [None, "4"]}, r"Expected `int \| null`, got `str`.*windows"),
        ({"windows": [0]}, r"AttentionConfig\.window must be None or >= 1, got 0"),
        ({"sinks": 4}, r"unknown fields config\.pattern\[0\]\.mixer\.sinks"),
    ],
)
def test_what_is_wrong_in_one_is_refused(attention, message, tmp_path):
    write(tmp_path, DECODER, old(**SIZES, attention=attention))
    with pytest.raises(CheckpointError, match=message) as caught:
        Description.read(tmp_path)
    assert re.search(r"convert the model again", str(caught.value))
