"""Presets against the parameter counts that their authors publish."""

import dataclasses

import pytest

from jaxinfer.models.presets import PRESETS, parameter_count, preset, vision_preset

# Counts of the published checkpoints, exactly; of our own shape, by hand.
EXACT = {
    "gpt2-1.5b": 1_557_611_200,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma3-1b": 999_885_952,
    # table and head, layers of (qkv, out, gate, up and down, two norms), the last norm
    "llama-213m": 2 * 32_000 * 1024 + 16 * (1536 * 1024 + 1024 * 1024 + 3 * 2816 * 1024 + 2 * 1024) + 1024,
}
# The DeepSpeed Inference paper's Table I in billions, rounded there: within 1.2 %.
ROUNDED = {"gpt-13b": 13, "gpt-50b": 50, "gpt-87b": 87, "lm-175b": 175, "lm-530b": 530}
# Its Table II in millions, without embeddings, biases, norms and routers.
EXPERTS = {
    "gpt-moe-52b": 52_345,
    "gpt-moe-107b": 106_871,
    "gpt-moe-349b": 348_966,
    "gpt-moe-1t": 1_064_960,
    "gpt-moe-2t": 2_024_003,
}


def counted(config):
    """The parameters of all layers, by the count of the first ones: of one round of the kinds of MLPs, and of two."""
    kinds = len({config.layer(layer).mlp for layer in range(config.layers)})
    rounds, rest = divmod(config.layers, kinds)
    assert not rest
    one, two = (parameter_count(dataclasses.replace(config, layers=count * kinds)) for count in (1, 2))
    return one + (rounds - 1) * (two - one)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count(name):
    count = counted(PRESETS[name])
    if name in EXACT:
        assert count == EXACT[name]
    elif name in EXPERTS:
        config = PRESETS[name]
        embeddings = (config.vocab + config.context) * config.embed
        assert count - embeddings == pytest.approx(EXPERTS[name] * 1e6, rel=0.0015)
        assert config.moe_layers == tuple(range(1, config.layers, 2))
    else:
        assert count == pytest.approx(ROUNDED[name] * 1e9, rel=0.012)


def test_parameter_count_of_all_layers():
    assert parameter_count(PRESETS["qwen3-0.6b"]) == EXACT["qwen3-0.6b"]


def test_unknown_preset_names_the_known():
    with pytest.raises(ValueError, match=r"preset='gpt-5'.*gpt2-1\.5b"):
        preset("gpt-5")


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [  # of ResNet and YOLOv5 without batch normalisation: a bias for its scale, shift, mean and variance
        ("resnet18", 1000, 11_689_512 - 4_800),
        ("resnet50", 1000, 25_557_032 - 26_560),
        pytest.param("resnet101", 2, 42_451_586, marks=pytest.mark.slow),
        ("vit-ti", 1000, 5_717_416),
        ("vit-s", 1000, 22_050_664),
        ("vit-b", 1000, 86_567_656),
        ("vit-l", 1000, 304_326_632),
        ("vit-h", 1000, 632_045_800),
        ("yolov5n", 80, 1_872_157 - 4_752),
        pytest.param("yolov5s", 80, 7_235_389 - 9_504, marks=pytest.mark.slow),
        pytest.param("yolov5m", 80, 21_190_557 - 18_384, marks=pytest.mark.slow),
        ("yolov5m", 1, 20_871_318 - 18_384),
        pytest.param("yolov5l", 80, 46_563_709 - 30_016, marks=pytest.mark.slow),
        pytest.param("yolov5x", 80, 86_749_405 - 44_400, marks=pytest.mark.slow),
    ],
)
def test_image_models_have_the_published_sizes(name, classes, parameters):
    config = vision_preset(name, labels=("x",) * classes)
    assert (counted if name.startswith("vit") else parameter_count)(config) == parameters


def test_image_models_can_be_shrunk():
    config = vision_preset("resnet101", labels=("ok",), depths=(1, 1, 1, 1), image_size=64)
    assert (config.widths, config.depths, config.image_size) == ((256, 512, 1024, 2048), (1, 1, 1, 1), 64)
    with pytest.raises(ValueError, match="preset='resnet102' is not known; known: resnet18"):
        vision_preset("resnet102", labels=("ok",))
