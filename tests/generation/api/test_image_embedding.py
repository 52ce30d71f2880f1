"""Vectors of images: those that `transformers` pools from the same pixels."""

import json
import pathlib

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer import Embedder
from jaxinfer.cli import app
from jaxinfer.models.files.conversion import convert
from jaxinfer.serving import ClosedError
from jaxinfer.sharding import MeshConfig
from tests.goldens.expected import read_expected

GOLDENS = pathlib.Path(__file__).parents[2] / "goldens/vision"
PHOTO = GOLDENS / "photo.png"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SigLIP, whose images of 64 x 64 pixels are resized ones of any ratio."""
    path = tmp_path_factory.mktemp("models") / "siglip"
    convert(GOLDENS / "siglip_vision", path)
    return path


@pytest.fixture(scope="module")
def embedder(folder):
    with Embedder(folder, max_batch=2) as embedder:
        yield embedder


def test_vectors_are_the_pooled_ones_of_transformers(embedder):
    expected = read_expected(GOLDENS / "siglip_vision")
    vectors = expected["features"] / np.linalg.norm(expected["features"], axis=1, keepdims=True)
    np.testing.assert_allclose(embedder.embed(expected["images"]), vectors, atol=1e-5)
    first, second = expected["images"]
    three = embedder.embed([second, first, second])  # more than a batch
    np.testing.assert_allclose(three, vectors[[1, 0, 1]], atol=1e-5)
    np.testing.assert_allclose(embedder.embed(first), vectors[:1], atol=1e-5)
    assert embedder.embed([]).shape == (0, vectors.shape[1])


def test_all_kinds_of_images(embedder):
    image = pytest.importorskip("PIL.Image")
    photo = image.open(PHOTO)
    resized = np.asarray(photo.resize((64, 64), image.Resampling.BICUBIC))
    from_files = embedder.embed([PHOTO, str(PHOTO), photo, np.asarray(photo), resized])
    np.testing.assert_allclose(from_files, np.broadcast_to(from_files[:1], from_files.shape), atol=1e-6)
    np.testing.assert_array_equal(embedder.embed(PHOTO), embedder.embed(photo))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([np.zeros((64, 64, 3), np.float32)], r"Image 0: an image must be uint8 \[H, W, 3\] \(RGB\), got float32"),
        ([np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), np.uint8)], r"Image 1: .* got uint8 \[64, 64\]"),
        ([np.zeros((0, 64, 3), np.uint8)], r"Image 0: .* got uint8 \[0, 64, 3\]"),
    ],
)
def test_wrong_images_are_named(embedder, images, message):
    with pytest.raises(ValueError, match=message):
        embedder.embed(images)


def test_what_is_for_texts_is_refused_by_name(embedder, folder):
    image = np.zeros((64, 64, 3), np.uint8)
    with pytest.raises(ValueError, match="adapter='a' is not supported for an image model"):
        embedder.embed(image, adapter="a")
    with pytest.raises(ValueError, match="truncate=False is not supported for an image model"):
        embedder.embed(image, truncate=False)
    with pytest.raises(ValueError, match=r"Embedder\.engine is not available for an image model"):
        _ = embedder.engine
    for name, value in (("context", 4), ("weights", "host"), ("cache_bytes", 1)):
        with pytest.raises((ValueError, TypeError), match=name):
            Embedder(folder, **{name: value})
    for level in (1, -9):
        with pytest.raises(ValueError, match=rf"level={level} must be in \[-8, 0\] for 16 patches"):
            Embedder(folder, level=level)


def test_quantised_or_with_merged_tokens_vectors_are_near(embedder, folder):
    images = read_expected(GOLDENS / "siglip_vision")["images"]
    exact = embedder.embed(images)
    for options in ({"quantize": "int8"}, {"level": -2}):
        with Embedder(folder, max_batch=2, **options) as other:
            near = other.embed(images)
        assert np.abs(near - exact).max() > 1e-6
        assert np.sum(near * exact, axis=1).min() > 0.9
    with pytest.raises(ClosedError):
        other.embed(images)


@pytest.mark.parametrize("mesh", [MeshConfig(data=2), MeshConfig(data=2, tensor=3)], ids=["lanes", "lanes_of_parts"])
def test_on_a_mesh_vectors_are_those_of_one_device(embedder, folder, mesh):
    """Heads and MLPs do not divide by 3, that of the pooling included."""
    images = read_expected(GOLDENS / "siglip_vision")["images"]
    three = [images[1], images[0], images[1]]
    with Embedder(folder, max_batch=2, mesh=mesh) as divided:
        np.testing.assert_allclose(divided.embed(three), embedder.embed(three), atol=1e-5)


def test_backbones_give_the_class_token(tmp_path):
    convert(GOLDENS / "dinov2_backbone", tmp_path / "model")
    expected = read_expected(GOLDENS / "dinov2_backbone")
    vectors = expected["features"] / np.linalg.norm(expected["features"], axis=1, keepdims=True)
    with Embedder(tmp_path / "model") as embedder:
        # 72 x 72 pixels, of which the middle 64 x 64 are the golden's
        images = np.pad(expected["images"], ((0, 0), (4, 4), (4, 4), (0, 0)))
        np.testing.assert_allclose(embedder.embed(images), vectors, atol=1e-5)


def test_on_the_command_line(folder, embedder):
    pytest.importorskip("PIL")
    done = CliRunner().invoke(app, ["embed", str(folder), "--image", str(PHOTO), "--image", str(PHOTO)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["index"], line["image"]) for line in lines] == [(0, str(PHOTO)), (1, str(PHOTO))]
    np.testing.assert_allclose(lines[1]["embedding"], embedder.embed(PHOTO)[0], atol=1e-6)
    done = CliRunner().invoke(app, ["embed", str(folder), "--image", str(PHOTO), "a text"])
    assert done.exit_code == 2
    assert "--image: a model takes either images or texts" in done.output.replace("\n", " ")
