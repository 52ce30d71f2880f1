"""Image models against torchvision, `transformers` and Ultralytics, in float32, and their sizes with normalisation."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from checkpoints import CheckpointError
from jaxinfer.cli import app
from jaxinfer.models import ResNet, Yolo
from jaxinfer.models.abstract import merge_model
from jaxinfer.models.config import STRIDES
from jaxinfer.models.conversion import HuggingFaceModel, convert
from jaxinfer.models.description import Description
from jaxinfer.models.families import torchvision_resnet, yolov5
from jaxinfer.models.loading import load_model
from jaxinfer.models.presets import vision_preset
from jaxinfer.models.verification import compare_outputs, compare_tensors
from tests.models import vision

SIZE = 64  # of the goldens' images


def read(name: str):
    """The golden's model, converted in memory, and what was expected of it."""
    source = HuggingFaceModel(vision.DIRECTORY / name)
    config = dataclasses.replace(source.config, image_size=SIZE)
    leaves = {leaf: source.read(leaf).astype(np.float32) for leaf in source.leaf_names}
    shapes = vision.shapes(config)
    assert {leaf: array.shape for leaf, array in leaves.items()} == {leaf: shapes[leaf].shape for leaf in shapes}
    model = merge_model(config, vision.FLOAT32, [leaves[leaf] for leaf in shapes])
    return model, load_file(vision.DIRECTORY / name / "expected.safetensors")


@pytest.mark.parametrize("name", [name for name in vision.GOLDENS if "resnet" in name or "torchvision" in name])
def test_classifiers(name):
    model, expected = read(name)
    assert isinstance(model, ResNet)
    np.testing.assert_allclose(vision.run(model.logits, expected["images"]), expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in vision.GOLDENS if name.startswith("yolov5")])
def test_detectors(name):
    model, expected = read(name)
    assert isinstance(model, Yolo)
    found = vision.run(model.predictions, expected["images"])
    start, theirs = 0, []
    for stride in STRIDES:  # theirs have all cells of one anchor together
        side = SIZE // stride
        grid = expected["predictions"][:, start : (start := start + 3 * side**2)]
        theirs.append(grid.reshape(2, 3, side**2, -1).swapaxes(1, 2).reshape(2, 3 * side**2, -1))
    np.testing.assert_allclose(found, np.concatenate(theirs, axis=1), atol=1e-4, rtol=1e-6)


def test_anchors_are_the_checkpoint_s():
    def anchors(name):
        return np.array(HuggingFaceModel(vision.DIRECTORY / name).config.anchors)

    np.testing.assert_array_equal(anchors("yolov5_thin"), vision.DETECTOR.anchors)
    np.testing.assert_allclose(anchors("yolov5_deep"), 0.8125 * np.array(vision.DETECTOR.anchors), rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "classes", "parameters", "statistics"),
    [
        ("resnet18", 1000, 11_689_512, 9_600),
        ("resnet50", 1000, 25_557_032, 53_120),
        ("resnet101", 1000, 44_549_160, 105_344),
        ("resnet101", 2, 42_504_258, 105_344),
        ("resnet101", 10, 42_520_650, 105_344),
        ("yolov5n", 80, 1_872_157, 9_504),
        ("yolov5s", 80, 7_235_389, 19_008),
        ("yolov5m", 80, 21_190_557, 36_768),
        ("yolov5m", 1, 20_871_318, 36_768),
        ("yolov5m", 2, 20_875_359, 36_768),
        ("yolov5m", 3, 20_879_400, 36_768),
        ("yolov5l", 80, 46_563_709, 60_032),
        ("yolov5l", 1, 46_138_294, 60_032),
        ("yolov5l", 2, 46_143_679, 60_032),
        ("yolov5l", 3, 46_149_064, 60_032),
        ("yolov5x", 80, 86_749_405, 88_800),
    ],
)
def test_checkpoints_have_the_published_sizes(name, classes, parameters, statistics):
    family = (torchvision_resnet if name.startswith("resnet") else yolov5).FAMILY
    config = vision_preset(name, labels=("x",) * classes)
    tensors = {}
    for source in family.sources(config).values():
        tensors |= dict(zip(source.names, source.shapes, strict=True))
    running = {tensor for tensor in tensors if "running_" in tensor}
    assert sum(math.prod(tensors[tensor]) for tensor in running) == statistics
    assert sum(math.prod(shape) for tensor, shape in tensors.items() if tensor not in running) == parameters
    found = family.config(tensors)
    assert dataclasses.replace(found, labels=config.labels) == config
    assert len(found.labels) == classes


# Conversion.


@pytest.mark.parametrize("name", ["torchvision_bottleneck", "resnet_basic", "yolov5_deep"])
def test_converted_and_loaded(name, tmp_path):
    description = convert(vision.DIRECTORY / name, tmp_path / "model")
    assert Description.read(tmp_path / "model") == description
    assert description.dtype == ("float16" if name == "yolov5_deep" else "float32")
    loaded, source = load_model(tmp_path / "model"), HuggingFaceModel(vision.DIRECTORY / name)
    assert loaded.config == source.config
    for leaf in source.leaf_names:
        exact = source.read(leaf)
        tolerance = 1e-3 if description.dtype == "float16" and exact.ndim > 1 else 0
        np.testing.assert_allclose(loaded.leaves[leaf], exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())
    report = compare_tensors(tmp_path / "model", vision.DIRECTORY / name)
    assert (report.tensors, report.beyond) == (len(source.leaf_names), ())


def test_a_state_dict_s_file_and_labels(tmp_path):
    file = tmp_path / "any name.safetensors"
    shutil.copyfile(vision.DIRECTORY / "torchvision_basic/model.safetensors", file)
    assert HuggingFaceModel(file).config.labels == ("0", "1", "2")
    (tmp_path / "labels.txt").write_text("ok\nscratch\n\nbig dent \n")
    description = convert(file, tmp_path / "model")
    assert description.config.labels == ("ok", "scratch", "big dent")
    assert (description.family, description.kind) == ("torchvision_resnet", "classifier")
    (tmp_path / "labels.txt").write_text("ok\n")
    with pytest.raises(CheckpointError, match=r"labels\.txt has 1 labels for 3 classes"):
        HuggingFaceModel(file)


def test_labels_of_transformers():
    assert HuggingFaceModel(vision.DIRECTORY / "resnet_basic").config.labels == ("cat", "dog", "fish")


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_prefixes_of_wrapped_models(prefix, tmp_path):
    name = "yolov5_thin" if prefix == "model." else "torchvision_basic"
    tensors = load_file(vision.DIRECTORY / name / "model.safetensors")
    save_file({prefix + key: tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert HuggingFaceModel(tmp_path).config == HuggingFaceModel(vision.DIRECTORY / name).config


def _refuses(name, tmp_path, message, change):
    tensors = load_file(vision.DIRECTORY / name / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as error:
        HuggingFaceModel(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message", "change"),
    [
        (
            "torchvision_basic",
            r"do not fit a torchvision_resnet \(1 missing: layer2.0.bn1.running_var\)",
            lambda t: t.pop("layer2.0.bn1.running_var"),
        ),
        ("torchvision_basic", "1 unexpected: extra.weight", lambda t: t.update({"extra.weight": t["fc.weight"]})),
        ("torchvision_basic", "fc.weight is missing", lambda t: t.pop("fc.weight")),
        (
            "torchvision_bottleneck",  # ResNeXt: groups
            r"1 mis-shaped: layer1.0.conv2.weight is \[4, 2, 3, 3\]",
            lambda t: t.update({"layer1.0.conv2.weight": t["layer1.0.conv2.weight"][:, :2].copy()}),
        ),
        ("yolov5_thin", "do not fit a yolov5", lambda t: t.pop("model.9.cv2.conv.weight")),
        ("yolov5_thin", "24.m.0.weight is missing", lambda t: t.pop("model.24.m.0.weight")),
        (
            "yolov5_thin",
            r"24.anchors is \[3, 2, 2\]: only models with three anchors",
            lambda t: t.update({"model.24.anchors": t["model.24.anchors"][:, :2].copy()}),
        ),
        ("yolov5_thin", r"config\.json: no such file", lambda t: t.pop("model.2.cv1.conv.weight")),
    ],
)
def test_other_tensors_are_refused(name, message, change, tmp_path):
    _refuses(name, tmp_path, message, change)


@pytest.mark.parametrize(
    ("field", "value"), [("downsample_in_bottleneck", True), ("hidden_act", "gelu"), ("layer_type", "wide")]
)
def test_other_resnets_of_transformers_are_refused(field, value, tmp_path):
    fields = json.loads((vision.DIRECTORY / "resnet_basic/config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shutil.copyfile(vision.DIRECTORY / "resnet_basic/model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{field}={value!r} is not implemented"):
        HuggingFaceModel(tmp_path)


@pytest.mark.parametrize("name", ["best.pt", "resnet.pth"])
def test_pickles_are_refused(name, tmp_path):
    (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=r"save its state dict where torch is: safetensors\.torch\.save_file"):
            convert(path, tmp_path / "out")


def test_quantisation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="quantize='int8' is not implemented for an image detector"):
        convert(vision.DIRECTORY / "yolov5_thin", tmp_path / "out", quantize="int8")
    assert not (tmp_path / "out").exists()


def test_outputs_are_compared(tmp_path):
    golden = vision.DIRECTORY / "torchvision_basic"
    convert(golden, tmp_path / "model")
    resized = load_file(golden / "expected.safetensors")  # at the golden's size, not the converted model's
    with pytest.raises(CheckpointError, match=r"contains \['images'\]; needs images and logits"):
        compare_outputs(tmp_path / "model", _written(tmp_path, images=resized["images"]))
    with pytest.raises(CheckpointError, match=r"outputs of shape \[2, 2\] do not fit the model's \[2, 3\]"):
        compare_outputs(tmp_path / "model", _written(tmp_path, images=resized["images"], logits=np.zeros((2, 2))))
    model = load_model(tmp_path / "model")
    logits = vision.run(merge_model(model.config, model.weights, list(model.leaves.values())).logits, resized["images"])
    report = compare_outputs(tmp_path / "model", _written(tmp_path, images=resized["images"], logits=logits + 0.5))
    assert report.max_abs_diff == pytest.approx(0.5, abs=1e-4)
    assert (report.kl, report.top1) == (None, None)


def _written(folder, **tensors):
    file = folder / "reference.safetensors"
    save_file(tensors, file)
    return file


def test_layers_of_image_models_are_not_written(tmp_path):
    arguments = ["convert", str(vision.DIRECTORY / "yolov5_thin"), str(tmp_path / "out"), "--layout", "streaming"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "holds an image detector" in done.output
    assert not (tmp_path / "out").exists()
