"""What each kind of expert takes, and what it refuses before anything runs."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.experts.errors import ConfigError, InvalidInputError
from jaxinfer.experts.execution.architectures import Architecture
from jaxinfer.experts.execution.kinds import Classifier, TextEncoder, kind_of
from jaxinfer.models.files.loading import open_model
from jaxinfer.models.vision.image_files import fitted
from jaxinfer.models.vision.images import Letterbox
from jaxinfer.models.vision.vit import ViT
from tests.experts.boards import SIZE, architecture, image, save


@pytest.mark.parametrize("name", ["c0", "d0", "v0"])
def test_images(board, name):
    kind = kind_of(open_model(board / name))
    value = image(0)
    np.testing.assert_array_equal(kind.check(value), value)
    assert not np.shares_memory(kind.check(value), value)
    for bad in (value[:-1], value[..., :1], value.astype(np.float32), value[None], "scratch.png", float("nan"), None):
        with pytest.raises(InvalidInputError, match=rf"must be uint8 \[{SIZE}, {SIZE}, 3\] .* got "):
            kind.check(bad)


def test_texts(board):
    opened = open_model(board / "e0")
    kind = kind_of(opened, tokens=8)
    np.testing.assert_array_equal(kind.check([1, 2, 3]), [1, 2, 3, -1, -1, -1, -1, -1])
    assert (kind.check("abc") >= 0).sum() == 3
    for bad in ("123456789", "", [], [[1]], [0.5], image(0)):
        with pytest.raises(InvalidInputError, match="token ids must be 1 to 8 integers"):
            kind.check(bad)
    for bad in ([-1], [257]):
        with pytest.raises(InvalidInputError, match=r"token ids must be in \[0, 257\)"):
            kind.check(bad)
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        TextEncoder(opened.config).check("abc")


def test_options_of_another_kind(board, model_dir):
    with pytest.raises(ConfigError, match="tokens is for encoders"):
        kind_of(open_model(board / "c0"), tokens=8)
    with pytest.raises(ConfigError, match="image_size is for classifiers"):
        kind_of(open_model(board / "e0"), size=(8, 8))
    with pytest.raises(ConfigError, match="a language model cannot be an expert"):
        kind_of(open_model(model_dir))


def test_a_backbone_is_no_expert(board, tmp_path):
    config = dataclasses.replace(open_model(board / "v0").config, labels=())
    save(tmp_path / "backbone", ViT, config, "dinov2", 0)
    with pytest.raises(ConfigError, match="has no head of classes, so it gives no verdicts"):
        kind_of(open_model(tmp_path / "backbone"))


def test_experts_with_other_labels_share_their_architecture(board):
    one = architecture(board / "c0")
    opened = open_model(board / "c1")
    renamed = Classifier(dataclasses.replace(opened.config, labels=("x", "y")))
    assert one == architecture(board / "c1") == Architecture.from_kind(renamed, opened.weights)
    larger = Architecture.from_kind(kind_of(opened, size=(64, 64)), opened.weights)
    names = {one.name, larger.name, *(architecture(board / name).name for name in ("d0", "e0", "v0"))}
    assert len(names) == 5


@pytest.mark.parametrize("shape", [(60, 90, 3), (90, 60, 3), (32, 32, 3), (7, 500, 3), (500, 1, 3)])
def test_images_of_any_size_become_inputs(board, shape):
    pytest.importorskip("PIL.Image")
    photo = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for name in ("c0", "v0"):
        opened = open_model(board / name)
        made, size = kind_of(opened).fit(photo), opened.config.image_size
        np.testing.assert_array_equal(made, fitted(photo, size, opened.config.preprocessing))
    assert made.shape == (32, 32, 3)
    square, box = kind_of(open_model(board / "d0")).fit(photo), Letterbox.fit(*shape[:2], 32)
    inside = np.zeros((32, 32), bool)
    inside[box.top : box.top + box.height, box.left : box.left + box.width] = True
    assert (square[~inside] == 114).all()
    pillow = pytest.importorskip("PIL.Image")
    expected = pillow.fromarray(photo).resize((box.width, box.height), pillow.Resampling.BILINEAR)
    np.testing.assert_allclose(square[inside].astype(int), np.asarray(expected).reshape(-1, 3), rtol=0, atol=1)


@pytest.mark.parametrize("name", ["c0", "d0"])
def test_an_expert_with_a_size_of_its_own_resizes_itself(board, name):
    kind = kind_of(open_model(board / name), size=(48, 64))
    photo = np.zeros((48, 64, 3), np.uint8)
    assert kind.fit(photo).shape == photo.shape
    with pytest.raises(InvalidInputError, match=r"must be uint8 \[48, 64, 3\] .* got uint8 \[32, 32, 3\]"):
        kind.fit(photo[:32, :32])
