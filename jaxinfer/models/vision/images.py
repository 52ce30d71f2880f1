"""Images on their way into a model: resized, letterboxed, normalised, all inside the compiled program.

Images are uint8 [B, H, W, 3], RGB. Their size is part of the shape, so each size is a program of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of the pixels of ImageNet, for red, green and blue in [0, 1]."""

GREY = 114 / 255
"""The colour around a letterboxed image."""


class Letterbox(NamedTuple):
    """Where an image lies in the square that it was fitted into.

    Attributes:
      scale: pixels of the square for one of the image.
      left, top: pixels of the border.
      height, width: of the scaled image.
    """

    scale: float
    left: int
    top: int
    height: int
    width: int

    @classmethod
    def fit(cls, height: int, width: int, size: int) -> "Letterbox":
        """Fit an image into the middle of a square, as large as its ratio allows."""
        scale = size / max(height, width)
        scaled_height, scaled_width = (max(1, round(side * scale)) for side in (height, width))
        return cls(scale, (size - scaled_width) // 2, (size - scaled_height) // 2, scaled_height, scaled_width)


def check_images(images: jax.Array) -> None:
    """Raise ValueError unless these are images as above."""
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != jnp.uint8:
        raise ValueError(f"images must be uint8 [B, H, W, 3], got {images.dtype.name} {list(images.shape)}.")


def normalised_pixels(
    images: jax.Array, size: int, mean: Sequence[float] = MEAN, deviation: Sequence[float] = DEVIATION
) -> jax.Array:
    """Return images as float32 [B, size, size, 3], less the mean, divided by the deviation, of each colour in [0, 1].

    Images of another size are resized, without keeping their ratio (`resize`).
    """
    pixels = resize(images.astype(jnp.float32) / 255, size, size)
    return (pixels - np.asarray(mean, np.float32)) / np.asarray(deviation, np.float32)


def letterboxed_pixels(images: jax.Array, size: int) -> jax.Array:
    """Place images in the middle of grey squares, float32 [B, size, size, 3] in [0, 1], as `Letterbox.fit` says."""
    _, height, width, _ = images.shape
    box = Letterbox.fit(height, width, size)
    pixels = resize(images.astype(jnp.float32) / 255, box.height, box.width)
    below, right = size - box.top - box.height, size - box.left - box.width
    return jnp.pad(pixels, ((0, 0), (box.top, below), (box.left, right), (0, 0)), constant_values=GREY)


def resize(pixels: jax.Array, height: int, width: int) -> jax.Array:
    """Interpolate bilinearly, without antialiasing: [B, H, W, C] -> [B, height, width, C].

    This equals `jax.image.resize(..., "bilinear", antialias=False)`, which multiplies by a dense matrix for each side
    where two gathers do.
    """
    for axis, length in ((1, height), (2, width)):
        size = pixels.shape[axis]
        if size == length:
            continue
        places = np.clip((np.arange(length) + 0.5) * (size / length) - 0.5, 0, size - 1)
        before = places.astype(np.int32)
        after = np.minimum(before + 1, size - 1)
        weight = (places - before).astype(np.float32).reshape(-1, *[1] * (3 - axis))
        pixels = pixels.take(before, axis) * (1 - weight) + pixels.take(after, axis) * weight
    return pixels
