"""The comparison of image models: what counts as agreement, and what the checks are made of."""

import numpy as np
import pytest

from benchmarks.image_engines import add_row, check_agreement
from benchmarks.report import Report
from benchmarks.vision import flops, merge_levels, speedup
from benchmarks.vision_models import add_checks
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, PromptMode, TokenAdaptation
from jaxinfer.models.presets import vision_preset


def test_small_differences_agree():
    ours = np.array([[1.0, -2.0], [0.001, 4.0]])
    theirs = ours + np.array([[0.001, 0], [-0.002, 0.0]])
    assert check_agreement({"jaxinfer": ours, "torch": theirs}) == pytest.approx(0.002 / 4)


def test_columns_of_predictions_are_apart():
    """A difference that is little for a box, in pixels, is much for a probability."""
    ours = np.array([[[600.0, 0.5], [20.0, 0.25]]])
    assert check_agreement({"jaxinfer": ours, "torch": ours + np.array([0.3, 0.0])}) == pytest.approx(0.0005)
    with pytest.raises(SystemExit, match=r"outputs of onnxruntime differ by 0\.6"):
        check_agreement({"jaxinfer": ours, "torch": ours, "onnxruntime": ours + np.array([0.0, 0.3])})


def test_nothing_agrees_with_nan():
    with pytest.raises(SystemExit, match="differ by nan"):
        check_agreement({"jaxinfer": np.ones((1, 2)), "torch": np.full((1, 2), np.nan)})


def test_checks_are_of_the_worse_batch():
    report = Report()
    for name, factors in (("resnet101", (1.5, 1.25)), ("yolov5m", (0.5, 2.0))):
        for batch, factor in zip((1, 8), factors, strict=True):
            add_row(report, f"{name} batch {batch}", "jaxinfer", [0.1, 0.2, 0.9])
            add_row(report, f"{name} batch {batch}", "torch", [0.2 * factor] * 3)
    add_checks(report)
    assert [(check.name, check.value, check.met) for check in report.checks] == [
        ("resnet_vs_torch", 1.25, True),
        ("yolo_vs_torch", 0.5, False),
    ]


def test_flops_of_levels():
    """ViT-B takes 17.6 G multiplications of an image, as its tables say."""
    config = vision_preset("vit-b", labels=("x",))
    assert flops(config, NO_ADAPTATION) / 2e9 == pytest.approx(17.56, abs=0.01)
    found = {level: round(speedup(config, adaptation), 2) for level, adaptation in merge_levels(12).items()}
    assert {level: found[level] for level in ("0", "-5", "-10", "-13", "-15", "-20", "-25")} == {
        **{"0": 1.0, "-5": 1.19, "-10": 1.46, "-13": 1.69, "-15": 1.89, "-20": 2.46, "-25": 3.03}
    }
    replaced, added = (1 / speedup(config, TokenAdaptation(prompts=8, prompt_mode=mode)) for mode in PromptMode)
    assert 1.03 < replaced < 1.05
    assert 1.25 < added < 1.31
