"""Images on their way into a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import PreprocessingConfig
from jaxinfer.models.vision import images
from jaxinfer.models.vision.images import Letterbox
from tests.models import vision


@pytest.mark.parametrize(("height", "width"), [(7, 5), (31, 3), (8, 12), (1, 40)])
def test_resize_is_jax_s_bilinear(height, width):
    pixels = np.random.default_rng(0).random((2, 8, 12, 3), np.float32)
    expected = jax.image.resize(pixels, (2, height, width, 3), "bilinear", antialias=False)
    np.testing.assert_allclose(images.resize(jnp.asarray(pixels), height, width), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (480, 640, Letterbox(1.0, 0, 80, 480, 640)),
        (1280, 640, Letterbox(0.5, 160, 0, 640, 320)),
        (64, 64, Letterbox(10.0, 0, 0, 640, 640)),
        (1, 5000, Letterbox(0.128, 0, 319, 1, 640)),
    ],
)
def test_letterbox_keeps_the_ratio_and_centres(height, width, box):
    assert Letterbox.fit(height, width, 640) == box


def test_letterbox_is_grey_around_the_image():
    picture = vision.images(1, 20, 40, 3)
    square = images.letterboxed_pixels(jnp.asarray(picture), 64)
    np.testing.assert_allclose(square[0, :16], images.GREY)
    np.testing.assert_allclose(square[0, 48:], images.GREY)
    inside = jax.image.resize(picture / np.float32(255), (1, 32, 64, 3), "bilinear", antialias=False)
    np.testing.assert_allclose(square[:, 16:48], inside, atol=1e-6)


def test_pixels_are_normalised():
    imagenet = vision.CLASSIFIER.preprocessing
    pixels = images.preprocessed(jnp.full((1, 4, 4, 3), 255, jnp.uint8), 4, imagenet)
    np.testing.assert_allclose(pixels[0, 0, 0], [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225], 1e-6)
    assert images.preprocessed(jnp.zeros((1, 9, 5, 3), jnp.uint8), 4, imagenet).shape == (1, 4, 4, 3)


def test_images_that_are_not_resized():
    plain = PreprocessingConfig(resampling=None)
    assert images.preprocessed(jnp.zeros((1, 4, 4, 3), jnp.uint8), 4, plain).shape == (1, 4, 4, 3)
    with pytest.raises(ValueError, match="images must be 4 x 4, got 9 x 5"):
        images.preprocessed(jnp.zeros((1, 9, 5, 3), jnp.uint8), 4, plain)


@pytest.mark.parametrize("shape", [(4, 4, 3), (1, 4, 4, 1)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"images must be uint8 \[B, H, W, 3\], got uint8"):
        images.check_images(jnp.zeros(shape, jnp.uint8))


def test_floats_are_refused():
    with pytest.raises(ValueError, match=r"got float32 \[1, 4, 4, 3\]"):
        images.check_images(jnp.zeros((1, 4, 4, 3)))
