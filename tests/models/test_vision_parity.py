"""Image models against torchvision, `transformers`, timm and Ultralytics, in float32, and their sizes."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.cli import app
from jaxinfer.models import ResNet, ViT, ViTConfig, Yolo
from jaxinfer.models.abstract import merge_model
from jaxinfer.models.config import STRIDES, PreprocessingConfig, Resampling
from jaxinfer.models.families import family_of, timm_vit, torchvision_resnet, vit, yolov5
from jaxinfer.models.families.image_processors import with_preprocessor
from jaxinfer.models.files.conversion import HuggingFaceModel, convert
from jaxinfer.models.files.description import Description
from jaxinfer.models.files.loading import load_model
from jaxinfer.models.files.verification import compare_outputs, compare_tensors
from jaxinfer.models.presets import vision_preset
from jaxinfer.models.vision.image_files import fitted
from jaxinfer.models.vision.images import preprocessed
from tests.goldens.expected import read_expected
from tests.models import vision

SIZE = 64  # of the goldens' images
PROCESSORS = json.loads((vision.DIRECTORY / "image_processors.json").read_text())


def read(name: str):
    """The golden's model, converted in memory, and what was expected of it."""
    source = HuggingFaceModel(vision.DIRECTORY / name)
    config = source.config
    if not isinstance(config, ViTConfig):  # whose size is part of the checkpoint
        config = dataclasses.replace(config, image_size=SIZE)
    leaves = {leaf: source.read(leaf).astype(np.float32) for leaf in source.leaf_names}
    shapes = vision.shapes(config)
    assert {leaf: array.shape for leaf, array in leaves.items()} == {leaf: shapes[leaf].shape for leaf in shapes}
    model = merge_model(config, vision.FLOAT32, [leaves[leaf] for leaf in shapes])
    return model, read_expected(vision.DIRECTORY / name)


OFTEN = ("deit_class", "dinov2_registers", "resnet_basic", "siglip_both", "timm_vit_token", "torchvision_bottleneck")
OFTEN += ("dinov2_gated", "resnet_bottleneck", "siglip_vision_mean", "vit_odd")
"""One or two goldens of each family."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow)
        for name in vision.GOLDENS
        if not name.startswith("yolov5")
    ],
)
def test_classifiers_and_backbones(name):
    model, expected = read(name)
    assert isinstance(model, ResNet if "resnet" in name or "torchvision" in name else ViT)
    output = "logits" if model.cfg.labels else "features"
    actual = vision.run_method(getattr(model, output), expected["images"])
    np.testing.assert_allclose(actual, expected[output], atol=1e-4, rtol=0)


def test_a_backbone_has_no_classes():
    model, expected = read("dinov2_backbone")
    assert isinstance(model, ViT)
    with pytest.raises(ValueError, match="no head of classes"):
        model(expected["images"])


@pytest.mark.parametrize("name", [name for name in vision.GOLDENS if name.startswith("yolov5")])
def test_detectors(name):
    model, expected = read(name)
    assert isinstance(model, Yolo)
    actual = vision.run_method(model.predictions, expected["images"])
    start, theirs = 0, []
    for stride in STRIDES:  # theirs have all cells of one anchor together
        side = SIZE // stride
        grid = expected["predictions"][:, start : (start := start + 3 * side**2)]
        theirs.append(grid.reshape(2, 3, side**2, -1).swapaxes(1, 2).reshape(2, 3 * side**2, -1))
    np.testing.assert_allclose(actual, np.concatenate(theirs, axis=1), atol=1e-4, rtol=1e-6)


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
        ("vit-ti", 1000, 5_717_416, 0),
        ("vit-s", 1000, 22_050_664, 0),
        ("vit-b", 1000, 86_567_656, 0),
        ("vit-l", 1000, 304_326_632, 0),
        ("vit-h", 1000, 632_045_800, 0),
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
    families = {"resnet": torchvision_resnet, "vit": timm_vit, "yolov5": yolov5}
    family = next(module.FAMILY for start, module in families.items() if name.startswith(start))
    config = vision_preset(name, labels=("x",) * classes)
    tensors = {}
    for source in family.sources(config).values():
        tensors |= dict(zip(source.names, source.shapes, strict=True))
    running = {tensor for tensor in tensors if "running_" in tensor}
    assert sum(math.prod(tensors[tensor]) for tensor in running) == statistics
    assert sum(math.prod(shape) for tensor, shape in tensors.items() if tensor not in running) == parameters
    actual = family.config(tensors)
    assert dataclasses.replace(actual, labels=config.labels) == config
    assert len(actual.labels) == classes


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"model_type": "deit", "architectures": ["DeiTForImageClassificationWithTeacher"]}, 87_338_192),
        ({"model_type": "dinov2", "image_size": 518}, 86_579_712),  # without the mask's token, of training
        (
            {
                "model_type": "dinov2",
                "image_size": 518,
                "hidden_size": 1536,
                "num_hidden_layers": 40,
                "num_attention_heads": 24,
                "use_swiglu_ffn": True,
            },
            1_136_479_232,
        ),
        ({"model_type": "siglip", "vision_config": {}}, 92_884_224),
        (
            {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "image_size": 384,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
            428_225_600,
        ),
    ],
)
def test_relatives_have_the_published_sizes(fields, parameters):
    """DeiT-B with its teacher, DINOv2 B and g, SigLIP B/16 and So400m/14: by the fields of their files."""
    family, tensors = family_of(fields), {}
    for source in family.sources(family.config(fields | {"num_labels": 1000})).values():
        tensors |= dict(zip(source.names, source.shapes, strict=True))
    assert sum(map(math.prod, tensors.values())) == parameters


# Conversion.


@pytest.mark.parametrize("name", vision.GOLDENS)
def test_config_json_keeps_every_config(name, tmp_path):
    source = HuggingFaceModel(vision.DIRECTORY / name)
    description = Description(family=source.model_type, config=source.config, dtype=source.dtype)
    (tmp_path / "config.json").write_bytes(description.to_json())
    assert Description.read(tmp_path) == description


@pytest.mark.parametrize("name", ["torchvision_bottleneck", "yolov5_deep", "siglip_both"])
def test_converted_and_loaded(name, tmp_path):
    description = convert(vision.DIRECTORY / name, tmp_path / "model")
    assert Description.read(tmp_path / "model") == description
    assert description.dtype == ("float16" if name == "yolov5_deep" else "float32")
    loaded = load_model(tmp_path / "model", dtype=description.dtype)
    source = HuggingFaceModel(vision.DIRECTORY / name)
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


def test_each_state_dict_of_a_folder_may_have_its_labels(tmp_path):
    for name in ("resistor", "solder.v2", "other"):
        file = tmp_path / f"{name}.safetensors"
        shutil.copyfile(vision.DIRECTORY / "torchvision_basic/model.safetensors", file)

    def labels(name):
        return HuggingFaceModel(tmp_path / f"{name}.safetensors").config.labels

    (tmp_path / "resistor.labels.txt").write_text("a\nb\nc\n")
    (tmp_path / "solder.v2.labels.txt").write_text("d\ne\nf\n")
    assert [labels(name) for name in ("resistor", "solder.v2", "other")] == [tuple("abc"), tuple("def"), tuple("012")]
    (tmp_path / "labels.txt").write_text("g\nh\ni\n")
    assert [labels(name) for name in ("resistor", "solder.v2", "other")] == [tuple("abc"), tuple("def"), tuple("ghi")]
    (tmp_path / "resistor.labels.txt").write_text("a\n")
    with pytest.raises(CheckpointError, match=r"resistor\.labels\.txt has 1 labels for 3 classes; give one a line"):
        labels("resistor")


@pytest.mark.parametrize(
    ("name", "fields", "size", "resized", "keep_ratio"),
    [
        ("torchvision_basic", {"size": {"shortest_edge": 96}, "crop_pct": 0.75, "resample": 2}, 96, 128, True),
        ("torchvision_basic", {"size": 48, "image_processor_type": "ViTImageProcessor"}, 48, None, False),
        ("timm_vit_token", {"size": 64}, 64, None, False),
    ],
)
def test_a_state_dict_s_images_are_those_of_the_preprocessor_beside_it(
    name, fields, size, resized, keep_ratio, tmp_path
):
    for file in ("model", "other"):
        shutil.copyfile(vision.DIRECTORY / name / "model.safetensors", tmp_path / f"{file}.safetensors")
    colours = {"image_mean": [0.25, 0.5, 0.5], "image_std": [0.5, 0.5, 0.25]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields | colours))
    for path in (tmp_path, tmp_path / "other.safetensors"):
        config = HuggingFaceModel(path).config
        assert config.image_size == size
        assert (config.preprocessing.resized, config.preprocessing.keep_ratio) == (resized, keep_ratio)
        assert config.preprocessing.resampling is Resampling.BILINEAR
        assert (config.preprocessing.mean, config.preprocessing.deviation) == ((0.25, 0.5, 0.5), (0.5, 0.5, 0.25))


def test_labels_of_transformers():
    assert HuggingFaceModel(vision.DIRECTORY / "resnet_basic").config.labels == ("cat", "dog", "fish")
    assert HuggingFaceModel(vision.DIRECTORY / "vit_odd").config.labels == ("cat", "dog", "fish", "hen", "owl")


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "model.module.", "backbone.", "net."])
@pytest.mark.parametrize("name", ["torchvision_basic", "timm_vit_average", "yolov5_thin"])
def test_prefixes_of_wrapped_models(name, prefix, tmp_path):
    """As DataParallel, Lightning and classes of one's own write them."""
    tensors = load_file(vision.DIRECTORY / name / "model.safetensors")
    save_file({prefix + key: tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    wrapped, plain = HuggingFaceModel(tmp_path), HuggingFaceModel(vision.DIRECTORY / name / "model.safetensors")
    assert wrapped.config == plain.config
    for leaf in plain.leaf_names:
        np.testing.assert_array_equal(wrapped.read(leaf), plain.read(leaf))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (  # a loss with weights, in a checkpoint of Lightning
            lambda t: {f"model.{name}": x for name, x in t.items()} | {"criterion.weight": t["fc.bias"]},
            r"begin with 'model\.', but criterion\.weight do not; save the model's alone: {name: tensor for .*"
            r"if name\.startswith\('model\.'\)}",
        ),
        (  # a backbone whose head is elsewhere
            lambda t: {f"backbone.{name}"[9 * name.startswith("fc.") :]: x for name, x in t.items()},
            r"begin with 'backbone\.', but fc\.bias, fc\.weight do not",
        ),
        (
            lambda t: {f"{wrap}.{name}": x for name, x in t.items() for wrap in ("student", "teacher")},
            r"are of 2 models \(ResNet of torchvision\), which begin with student\., teacher\.; save those of one",
        ),
        (
            lambda t: {f"{wrap}{name}": x for name, x in t.items() for wrap in ("", "teacher.")},
            r"unexpected: teacher\.bn1\.bias, .* and \d+ more",
        ),
        (
            lambda t: {f"backbone.{name}": x for name, x in t.items() if not name.startswith("fc.")},
            r"fc\.weight is missing; use the whole state dict",
        ),
    ],
)
def test_prefixes_of_some_tensors_are_refused(change, message, tmp_path):
    tensors = change(load_file(vision.DIRECTORY / "torchvision_basic/model.safetensors"))
    save_file({name: x.copy() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceModel(tmp_path)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("class_token", "conv_proj.weight", "encoder.layers.encoder_layer_0.self_attention.in_proj_weight"),
            "those of ViT of torchvision, which is not implemented; known state dicts: ViT and DeiT of timm, ResNet",
        ),
        (("features.0.0.weight", "features.1.0.block.0.0.weight"), "those of EfficientNet, ConvNeXt or MobileNet of"),
        (("features.0.weight", "classifier.0.weight"), "those of VGG or AlexNet of torchvision"),
        (("conv_stem.weight", "blocks.0.0.conv_dw.weight"), "those of EfficientNet or MobileNet of timm"),
        (
            ("layers.0.mlp.up_proj.weight", "lm_head.weight"),
            r"tensors \(.*lm_head.weight, ...\) are of no known state dict .* name its folder, with config.json in it",
        ),
    ],
)
def test_other_state_dicts_are_refused_by_name(names, message, prefix, tmp_path):
    file = tmp_path / "mine.safetensors"
    save_file({prefix + name: np.zeros(1, np.float32) for name in names}, file)
    for path in (file, tmp_path):
        with pytest.raises(CheckpointError, match=message) as error:
            convert(path, tmp_path / "out")
        assert str(error.value).startswith(f"{path}: ")


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
        ("yolov5_thin", "those of a YOLO of another version, or with", lambda t: t.pop("model.24.m.0.weight")),
        (
            "yolov5_thin",
            r"24.anchors is \[3, 2, 2\]: only models with three anchors",
            lambda t: t.update({"model.24.anchors": t["model.24.anchors"][:, :2].copy()}),
        ),
        ("yolov5_thin", "1 missing: 2.cv1.conv.weight", lambda t: t.pop("model.2.cv1.conv.weight")),
    ],
)
def test_other_tensors_are_refused(name, message, change, tmp_path):
    _refuses(name, tmp_path, message, change)


@pytest.mark.parametrize(("field", "value"), [("num_channels", 1), ("hidden_act", "gelu"), ("layer_type", "wide")])
def test_other_resnets_of_transformers_are_refused(field, value, tmp_path):
    fields = json.loads((vision.DIRECTORY / "resnet_basic/config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shutil.copyfile(vision.DIRECTORY / "resnet_basic/model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{field}={value!r} is not implemented"):
        HuggingFaceModel(tmp_path)


# Vision transformers.


def copied(name, tmp_path, *, tensors=(), **files):
    """A golden's directory with changed tensors (name -> array, None to remove it) and fields of its JSON files."""
    shutil.copytree(vision.DIRECTORY / name, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors") | dict(tensors)
    save_file({key: array for key, array in stored.items() if array is not None}, tmp_path / "model.safetensors")
    for file, fields in files.items():
        path = tmp_path / f"{file}.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))
    return tmp_path


def test_pixels_are_normalised_as_the_files_say(tmp_path):
    def pixels(folder):
        preprocessing = HuggingFaceModel(folder).config.preprocessing
        return preprocessing.mean, preprocessing.deviation

    halves = (0.5,) * 3
    assert pixels(vision.DIRECTORY / "vit_odd") == ((0.25, 0.5, 0.625), (0.375, 0.25, 0.5))
    assert pixels(vision.DIRECTORY / "vit_unbiased") == pixels(vision.DIRECTORY / "timm_vit_token") == (halves, halves)
    assert pixels(vision.DIRECTORY / "timm_vit_average") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    plain = copied("vit_odd", tmp_path, preprocessor_config={"do_normalize": False})
    assert pixels(plain) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"size": SIZE},
        {"size": {"height": SIZE, "width": SIZE}, "crop_size": 8, "do_center_crop": False},
        {"image_processor_type": None, "feature_extractor_type": "ViTFeatureExtractor", "do_pad": False},
        {"rescale_factor": 0.00392156862745098, "image_processor_type": "ViTImageProcessorFast"},
    ],
)
def test_spellings_of_a_preprocessor(fields, tmp_path):
    folder = copied("vit_odd", tmp_path, preprocessor_config=fields)
    assert HuggingFaceModel(folder).config == HuggingFaceModel(vision.DIRECTORY / "vit_odd").config


PREPROCESSOR_FIELDS = {
    "nothing": [
        {"crop_size": {"height": 8, "width": 8}},  # nothing is cropped
        {"default_to_square": False},  # the size has two sides
        {"data_format": "channels_last"},
        {"device": "cpu"},
        {"disable_grouping": True},
        {"do_convert_rgb": True},
        {"do_pad": False},
        {"do_resize": True},
        {"do_rescale": True},
        {"do_normalize": True},
        {"do_center_crop": False},
        {"input_data_format": "channels_first"},
        {"return_tensors": "pt"},
        {"processor_class": "ViTProcessor"},
        {"auto_map": {"AutoImageProcessor": "x.Y"}},
        {"_valid_processor_keys": ["images"]},
        {"crop_pct": 0.5},  # ConvNext's
    ],
    "another config": [
        {"do_resize": False},
        {"resample": 3},
        {"rescale_factor": 0.25},
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": [0.1, 0.2, 0.3]},
        {"image_std": [0.1, 0.2, 0.3]},
    ],
    "refused": [
        {"do_pad": True},
        {"pad_size": {"height": 99, "width": 99}},
        {"image_seq_length": 5},
        {"size": {"height": 8, "width": 8}},
        {"size": {"longest_edge": 8}},
        {"do_center_crop": True},
        {"resample": 7},
        {"image_processor_type": "CLIPImageProcessor"},
        {"another": 1},
    ],
}
"""All fields of transformers' `ImagesKwargs`, of ConvNext's processor, and of the files themselves."""


@pytest.mark.parametrize(
    ("effect", "field"),
    [(effect, field) for effect, fields in PREPROCESSOR_FIELDS.items() for field in fields],
    ids=str,
)
def test_each_field_of_a_preprocessor_has_an_effect_or_is_known_to_have_none(effect, field, tmp_path):
    fields = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIZE, "width": SIZE}}
    folder, plain = copied("vit_odd", tmp_path, preprocessor_config=fields | field), vision.DIRECTORY / "vit_odd"
    if effect == "refused":
        with pytest.raises(CheckpointError, match=f"preprocessor_config.json: .*({next(iter(field))}|images of)"):
            HuggingFaceModel(folder)
    else:
        same = HuggingFaceModel(folder).config == HuggingFaceModel(plain).config
        assert same == (effect == "nothing")


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("vit_odd", {}, {"resampling": "bilinear"}),
        ("vit_odd", {"resample": 1}, {"resampling": "lanczos"}),
        ("vit_odd", {"do_resize": False}, {"resampling": None}),
        ("deit_teacher", {}, {"resampling": "bicubic", "resized": 72}),
        ("dinov2_backbone", {}, {"resampling": "bicubic", "resized": 72, "keep_ratio": True}),
        ("siglip_vision", {}, {"resampling": "bicubic"}),
        (
            "resnet_basic",
            {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 224, "crop_pct": 0.875, "resample": 3},
            {"resampling": "bicubic", "resized": 256, "keep_ratio": True},
        ),
        ("resnet_basic", {"size": {"shortest_edge": 384}}, {"resampling": "bicubic"}),
        ("timm_vit_average", {}, {"resampling": "bicubic", "resized": 71, "keep_ratio": True}),
    ],
)
def test_resizing_is_that_of_the_files(name, fields, expected, tmp_path):
    folder = copied(name, tmp_path, preprocessor_config=fields) if fields else vision.DIRECTORY / name
    config = HuggingFaceModel(folder).config
    plain = PreprocessingConfig(mean=config.preprocessing.mean, deviation=config.preprocessing.deviation)
    assert config.preprocessing == dataclasses.replace(plain, **expected)


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_are_resized_as_by_transformers(name):
    """A photograph that is taller than wide: on the host the same, in the program within one of 255 levels."""
    image = pytest.importorskip("PIL.Image")
    photo = np.asarray(image.open(vision.DIRECTORY / "photo.png"))
    fields, expected = PROCESSORS[name], read_expected(vision.DIRECTORY / "image_processors")[name]
    size = fields.get("crop_size") or fields["size"]
    config = dataclasses.replace(vision.CLASSIFIER, image_size=size.get("height", size.get("shortest_edge")))
    config = with_preprocessor(config, fields, "")
    assert expected.shape == (config.image_size, config.image_size, 3)
    for colours, given in ((config.preprocessing.mean, "image_mean"), (config.preprocessing.deviation, "image_std")):
        np.testing.assert_allclose(np.multiply(colours, 255 * fields["rescale_factor"]), fields[given])
    plain = dataclasses.replace(config.preprocessing, mean=(0.0,) * 3, deviation=(1.0,) * 3)
    in_program = 255 * vision.run(lambda images: preprocessed(images, config.image_size, plain), photo[None])[0]
    np.testing.assert_allclose(in_program, expected, atol=1.001)
    np.testing.assert_array_equal(fitted(photo, config.image_size, config.preprocessing), expected)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "config",
            {"architectures": ["ViTForMaskedImageModeling"]},
            r"architectures=\['ViTForMaskedImageModeling'\] is not implemented; known: ViTForImageClassification, ViTM",
        ),
        ("config", {"num_channels": 1}, "num_channels=1 is not implemented"),
        ("config", {"problem_type": "multi_label_classification"}, "problem_type='multi_label_classification'"),
        ("config", {"image_size": [64, 32]}, r"image_size=\[64, 32\] is not implemented, only squares"),
        ("config", {"patch_size": "16"}, "patch_size='16' must be of type int"),
        ("config", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu' is not implemented"),
        ("config", {"num_attention_heads": 5}, "24 is not a multiple of the 5 heads"),
        ("config", {"patch_size": 8}, r"embeddings.position_embeddings is \[1, 17, 24\]"),
        ("preprocessor_config", {"size": 72}, "images of 72 pixels do not fit images of 64 pixels"),
        ("preprocessor_config", {"size": {"height": 64, "width": 80}}, "size=.* is not implemented, only height and"),
        ("preprocessor_config", {"size": {"shortest_edge": 64}}, "without do_center_crop is not implemented"),
        ("preprocessor_config", {"size": {"shortest_edge": 64, "longest_edge": 80}}, "'longest_edge': 80} is not"),
        ("preprocessor_config", {"resample": 0}, r"resample=0 is not implemented; known: 1 \(lanczos\)"),
        ("preprocessor_config", {"do_center_crop": True, "crop_size": 64, "do_resize": False}, "without do_resize"),
        ("preprocessor_config", {"do_center_crop": True, "crop_size": 64, "size": 48}, "resized=48 is less than"),
        ("preprocessor_config", {"do_center_crop": True, "crop_size": {"shortest_edge": 64}}, "must have height and"),
        ("preprocessor_config", {"do_pad": True}, "do_pad=True is not implemented"),
        ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor"}, "='CLIPImageProcessor' is not impl"),
        ("preprocessor_config", {"rescale_factor": -1.0}, "rescale_factor=-1.0 must be > 0"),
        (
            "preprocessor_config",
            {"image_mean": [0.5]},
            r"preprocessor_config.json: image_mean=\[0.5\] must be",
        ),
        ("preprocessor_config", {"image_std": [0, 1, 1]}, "deviations > 0"),
    ],
)
def test_other_vits_of_transformers_are_refused(file, fields, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceModel(copied("vit_odd", tmp_path, **{file: fields}))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deit_class", {"architectures": ["DeiTForMaskedImageModeling"]}, r"architectures=\['DeiTForMasked"),
        ("deit_class", {"problem_type": "regression"}, "problem_type='regression' is not implemented"),
        ("deit_class", {"hidden_act": "mish"}, "hidden_act='mish' is not implemented"),
        ("dinov2_backbone", {"architectures": ["Dinov2Backbone"]}, r"architectures=\['Dinov2Backbone'\] is not"),
        ("dinov2_backbone", {"image_size": [98, 70]}, r"image_size=\[98, 70\] is not implemented"),
        ("dinov2_gated", {"use_swiglu_ffn": False}, "missing: .*mlp.fc1"),
        ("dinov2_registers", {"num_register_tokens": 4}, r"register_tokens is \[1, 3, 24\]"),
        ("siglip_both", {"model_type": "siglip2"}, "model_type='siglip2' is not implemented"),
        ("siglip_both", {"vision_config": {"num_channels": 1}}, "vision_config: num_channels=1 is not implemented"),
        ("siglip_vision", {"vision_use_head": False, "hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
    ],
)
def test_other_relatives_are_refused(name, fields, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceModel(copied(name, tmp_path, config=fields))


def test_a_vit_without_a_head_is_refused(tmp_path):
    tensors = load_file(vision.DIRECTORY / "vit_odd/model.safetensors")
    changes = dict.fromkeys(tensors) | {
        name.removeprefix("vit."): tensor for name, tensor in tensors.items() if name.startswith("vit.")
    }
    with pytest.raises(CheckpointError, match=r"do not fit a vit .*2 missing: classifier.weight, classifier.bias"):
        HuggingFaceModel(copied("vit_odd", tmp_path, tensors=changes))


def test_both_spellings_of_transformers(tmp_path):
    """Files have the names of transformers 4; the model itself has others since transformers 5."""
    renamed = {}
    for name, tensor in load_file(vision.DIRECTORY / "vit_odd/model.safetensors").items():
        plain = vit.FAMILY.plain_name(name)
        renamed |= {name: None} | {plain if plain.startswith("classifier") else f"vit.{plain}": tensor}
    folder = copied("vit_odd", tmp_path, tensors=renamed)
    assert "vit.layers.0.attention.q_proj.weight" in load_file(folder / "model.safetensors")
    ours, theirs = HuggingFaceModel(folder), HuggingFaceModel(vision.DIRECTORY / "vit_odd")
    for leaf in theirs.leaf_names:
        np.testing.assert_array_equal(ours.read(leaf), theirs.read(leaf))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"dist_token": np.zeros((1, 1, 64))}, "dist_token is of a ViT with the distillation token"),
        ({"reg_token": np.zeros((1, 4, 64))}, "register tokens"),
        ({"blocks.0.ls1.gamma": np.ones(64)}, "layer scale"),
        ({"blocks.0.attn.q_norm.weight": np.ones(64)}, "normalised queries and keys"),
        ({"cls_token": None}, "cls_token is missing; a ViT without a class token is not implemented"),
        ({"pos_embed": None}, "a ViT without learned positions"),
        (
            {"pos_embed": np.zeros((1, 16, 64), np.float32)},
            r"pos_embed \[1, 16, 64\] are of no square image",
        ),
        ({"pos_embed": np.zeros((1, 13, 64), np.float32)}, "no square image"),
        ({"patch_embed.proj.weight": np.zeros((64, 3, 16, 8), np.float32)}, "no square image"),
        ({"head.weight": None}, "head.weight is missing"),
        ({"norm.bias": None}, r"do not fit a timm_vit \(1 missing: norm.bias\)"),
        ({"blocks.0.attn.q_bias": np.zeros(64)}, "1 unexpected: blocks.0.attn.q_bias"),
        ({"cls_token": np.zeros((1, 1, 24), np.float32)}, "A width of 24 does not say how many heads"),
    ],
)
def test_other_vits_of_timm_are_refused(tensors, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceModel(copied("timm_vit_token", tmp_path, tensors=tensors))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_classes": 3}, "num_classes=3 does not fit the head of 5 classes"),
        ({"global_pool": "avg"}, "global_pool='avg' is not implemented for these tensors"),
        ({"global_pool": "map"}, "global_pool='map' is not implemented"),
        ({"pretrained_cfg": {"input_size": [3, 64, 32]}}, r"input_size=\[3, 64, 32\] is not implemented"),
        ({"input_size": [1, 64, 64]}, r"input_size=\[1, 64, 64\] is not implemented"),
        ({"pretrained_cfg": {"std": [0.5, 0.5]}}, r"std=\[0.5, 0.5\] must be a number for each"),
        ({"model_args": {"num_heads": 7}}, "64 is not a multiple of the 7 heads"),
        ({"model_args": []}, "model_args=.* must be of type dict"),
        ({"interpolation": "nearest"}, "interpolation='nearest' is not implemented"),
        ({"crop_mode": "border"}, "crop_mode='border' is not implemented"),
        ({"crop_pct": 1.5}, r"crop_pct=1.5 must be in \(0, 1\]"),
    ],
)
def test_other_directories_of_timm_are_refused(fields, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceModel(copied("timm_vit_token", tmp_path, config={"architecture": "vit_small_patch16_224"} | fields))


def test_other_models_of_timm_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="architecture='resnet50' is not implemented; of timm's models vit_"):
        HuggingFaceModel(copied("torchvision_basic", tmp_path, config={"architecture": "resnet50"}))


def test_heads_of_timm(tmp_path):
    def heads(folder):
        attention = HuggingFaceModel(folder).config.attention
        return attention.q_heads, attention.kv_heads, attention.head_dim

    assert heads(vision.DIRECTORY / "timm_vit_token") == (1, 1, 64)
    assert heads(vision.DIRECTORY / "timm_vit_average") == (4, 4, 16)
    token = {name: x.shape for name, x in load_file(vision.DIRECTORY / "timm_vit_token/model.safetensors").items()}
    for width, expected in ((768, 12), (1024, 16), (1280, 16), (1408, 16)):
        shapes = {name: tuple(width if side == 64 else side for side in shape) for name, shape in token.items()}
        assert timm_vit.FAMILY.config(shapes).attention.q_heads == expected


def test_a_vit_s_outputs_are_compared(tmp_path):
    for name in ("vit_odd", "timm_vit_average", "dinov2_backbone"):
        convert(vision.DIRECTORY / name, tmp_path / name)
        report = compare_outputs(tmp_path / name, _written(tmp_path, **read_expected(vision.DIRECTORY / name)))
        assert report.max_abs_diff < 1e-4


def test_a_vit_on_the_command_line(tmp_path):
    golden, model = vision.DIRECTORY / "timm_vit_token", tmp_path / "model"
    commands = (
        ("convert", golden, model, "--quantize", "int8"),
        ("verify", model, "--reference", golden),
        ("info", model),
    )
    for command in commands:
        done = CliRunner().invoke(app, list(map(str, command)))
        assert done.exit_code == 0, done.output
    assert "timm_vit (vision_transformer)" in done.output


@pytest.mark.parametrize("name", ["best.pt", "resnet.pth", "last.ckpt"])
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
    resized = read_expected(golden)  # at the golden's size, not the converted model's
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
    assert "is an image model (detector)" in done.output
    assert not (tmp_path / "out").exists()
