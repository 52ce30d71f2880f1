"""Images are resized as by Pillow, whatever their ratio, in memory that depends on the image and the result alone."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from jaxinfer.models.config import PreprocessingConfig, Resampling
from jaxinfer.models.vision import image_files
from jaxinfer.models.vision.image_files import (
    RATIO,
    TooManyPixelsError,
    fitted,
    letterboxed,
    read_image,
    unfitted,
    unletterboxed,
)
from jaxinfer.models.vision.images import resized_shape

SHAPES = [(48, 64), (64, 64), (90, 71), (201, 777), (999, 50), (1, 300), (300, 1), (3, 500), (1, 1), (501, 299)]
WAYS = [(64, None, False), (64, 71, True), (64, 71, False), (63, 64, True), (224, 256, True)]
"""The model's size, the size before the crop, and whether the ratio stays."""


def whole(image, size, cfg):
    """What image processors do: resize all with Pillow, then crop the middle."""
    pillow = pytest.importorskip("PIL.Image")
    height, width = resized_shape(image.shape[0], image.shape[1], size, cfg)
    kernel = pillow.Resampling["BILINEAR" if cfg.resampling is Resampling.LINEAR else cfg.resampling.name]
    resized = np.asarray(pillow.fromarray(image).resize((width, height), kernel))
    top, left = (height - size) // 2, (width - size) // 2
    return resized[top : top + size, left : left + size]


@pytest.mark.parametrize(
    ("resampling", "whole_bytes"),
    [*((kind, 0) for kind in Resampling), (Resampling.BICUBIC, image_files.WHOLE_BYTES)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_crop_of_the_resized_image(shape, resampling, whole_bytes, monkeypatch):
    """Of photographs to the bit, also next to sharp edges, where the order of the sides shows most."""
    monkeypatch.setattr(image_files, "WHOLE_BYTES", whole_bytes)
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    photograph = min(shape) >= 48 and max(shape) < RATIO * min(shape)
    images = (noise, np.where(noise > 127, 255, 0).astype(np.uint8)) if photograph else (noise,)
    for image, (size, resized, keep_ratio) in itertools.product(images, WAYS):
        cfg = PreprocessingConfig(resampling=resampling, resized=resized, keep_ratio=keep_ratio)
        actual, expected = fitted(image, size, cfg), whole(image, size, cfg)
        np.testing.assert_allclose(actual.astype(int), expected, rtol=0, atol=0 if photograph else 1)


def test_the_middle_of_a_long_line_is_that_of_a_short_one():
    """Resized whole, it would have 256 x 768,000 pixels."""
    line = np.random.default_rng(0).integers(0, 256, (3000, 1, 3), np.uint8)
    cfg = PreprocessingConfig(resampling=Resampling.LANCZOS, resized=256, keep_ratio=True)
    for image, middle in ((line, line[1490:1510]), (line.swapaxes(0, 1), line[1490:1510].swapaxes(0, 1))):
        np.testing.assert_allclose(fitted(image, 224, cfg).astype(int), whole(middle, 224, cfg), rtol=0, atol=1)


PEAK = """
import re

import numpy as np
from PIL import Image

from jaxinfer.models.config import PreprocessingConfig, Resampling
from jaxinfer.models.vision.image_files import RATIO, fitted

def memory(kind):
    return 1024 * int(re.search(rf"{kind}:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

squashed = PreprocessingConfig(resampling=Resampling.LANCZOS)
cropped = PreprocessingConfig(resampling=Resampling.LANCZOS, resized=256, keep_ratio=True)
fitted(np.zeros((9, 9, 3), np.uint8), 224, cropped)
for shape in ((1, 3000), (3000, 1), (1, 1_000_000), (1_000_000, 1), (3, 1_000_000), (1500, 2000)):
    image = np.zeros((*shape, 3), np.uint8)
    image.fill(1)
    for cfg in (cropped, squashed):
        before = memory("VmRSS")
        fitted(image, 224, cfg)
        print(*shape, memory("VmHWM") - before, image.nbytes + 4 * 3 * 224**2)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resizing_takes_no_more_memory_than_the_image_and_four_results():
    """By the process's peak, since Pillow's memory is its own."""
    pytest.importorskip("PIL.Image")
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    measured = [[*map(int, line.split())] for line in done.stdout.splitlines()]
    assert len(measured) == 12
    noise = 2 << 20  # of the process
    assert [row for row in measured if row[2] > row[3] + noise] == []


def box_of(image):
    """The box around what is white."""
    rows, columns = (np.flatnonzero((image > 200).all(-1).any(axis)) for axis in (1, 0))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])


@pytest.mark.parametrize("shape", [(64, 64), (90, 160), (160, 90), (400, 300), (33, 47)])
@pytest.mark.parametrize(
    "cfg",
    [
        PreprocessingConfig(),
        PreprocessingConfig(resampling=Resampling.BICUBIC, keep_ratio=True, resized=72),
        PreprocessingConfig(resampling=Resampling.BILINEAR, keep_ratio=True),
    ],
)
def test_boxes_move_back_to_the_image(shape, cfg):
    height, width = shape
    image = np.zeros((height, width, 3), np.uint8)
    box = np.array([0.4 * width, 0.3 * height, 0.7 * width, 0.6 * height]).round()
    left, top, right, bottom = box.astype(int)
    image[top:bottom, left:right] = 255
    pixel = 1.5 * max(shape) / 64 + 1  # of the result, in pixels of the image
    resized = box_of(fitted(image, 64, cfg))[None]
    np.testing.assert_allclose(unfitted(resized, shape, 64, cfg)[0], box, atol=pixel)
    lettered = box_of(letterboxed(image, 64))[None]
    np.testing.assert_allclose(unletterboxed(lettered, shape, 64)[0], box, atol=pixel)


def test_boxes_stay_inside_the_image():
    everything = np.array([[-5.0, -5.0, 70.0, 70.0]])
    assert unletterboxed(everything, (32, 64), 64).tolist() == [[0, 0, 64, 32]]
    assert unfitted(everything, (32, 64), 64, PreprocessingConfig()).tolist() == [[0, 0, 64, 32]]


def test_an_image_is_read_from_memory(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    file, pixels = tmp_path / "image.png", np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    pillow.fromarray(pixels).save(file)
    np.testing.assert_array_equal(read_image(file.read_bytes()), pixels)
    with pytest.raises(TooManyPixelsError, match=r"^photo: 4 x 4 are more than 15 pixels"):
        read_image(file.read_bytes(), name="photo", max_pixels=15)
    with pytest.raises(ValueError, match=r"^the image: not an image that can be read \(it is none of BMP"):
        read_image(b"no image")
