"""Images are resized as by Pillow, whatever their ratio, in memory that depends on the image and the result alone."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from jaxinfer.models.config import PreprocessingConfig, Resampling
from jaxinfer.models.vision import image_files
from jaxinfer.models.vision.image_files import RATIO, fitted
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
