"""Images on their way into a model: resized, letterboxed, normalised, all inside the compiled program.

Images are uint8 [B, H, W, 3], RGB. Their size is part of the shape, so each size is a program of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import PreprocessingConfig, Resampling
from jaxinfer.models.vision.resampling import resampling_matrix

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


def preprocessed(images: jax.Array, size: int, cfg: PreprocessingConfig) -> jax.Array:
    """Preprocess images for a model: float32 [B, size, size, 3].

    Images of another size are resized and cropped as the config says. Raises ValueError where it says they are not.
    """
    pixels = images.astype(jnp.float32) / 255
    height, width = images.shape[1:3]
    if (height, width) != (size, size):
        if cfg.resampling is None:
            raise ValueError(
                f"images must be {size} x {size}, got {height} x {width}: this model does not resize them."
            )
        height, width = resized_shape(height, width, size, cfg)
        pixels = resize(pixels, height, width, cfg.resampling)
        top, left = (height - size) // 2, (width - size) // 2
        pixels = pixels[:, top : top + size, left : left + size]
    return (pixels - np.asarray(cfg.mean, np.float32)) / np.asarray(cfg.deviation, np.float32)


def resized_shape(height: int, width: int, size: int, cfg: PreprocessingConfig) -> tuple[int, int]:
    """Return height and width of an image that is resized for a model of this size, before the middle is cropped."""
    side = size if cfg.resized is None else cfg.resized
    if not cfg.keep_ratio:
        return side, side
    shorter = min(height, width)
    return side * height // shorter, side * width // shorter


def is_height_first(shape: Sequence[int], resized: Sequence[int]) -> bool:
    """Return whether an image [height, width] is resized along its height first, as Pillow 13 does where it shrinks by
    more than twice what the width does, as was seen of it.

    Older versions never do, and differ next to sharp edges.
    """
    return 0 < shape[0] - resized[0] > 2 * (shape[1] - resized[1])


def letterboxed_pixels(images: jax.Array, size: int) -> jax.Array:
    """Place images in the middle of grey squares, float32 [B, size, size, 3] in [0, 1], as `Letterbox.fit` says."""
    _, height, width, _ = images.shape
    box = Letterbox.fit(height, width, size)
    pixels = resize(images.astype(jnp.float32) / 255, box.height, box.width)
    below, right = size - box.top - box.height, size - box.left - box.width
    return jnp.pad(pixels, ((0, 0), (box.top, below), (box.left, right), (0, 0)), constant_values=GREY)


def resize(pixels: jax.Array, height: int, width: int, resampling: Resampling = Resampling.LINEAR) -> jax.Array:
    """Resize pixels in [0, 1]: [B, H, W, C] -> [B, height, width, C].

    Pillow's ways round to 8 bits after each of the two sides, and so does this.
    """
    if resampling is Resampling.LINEAR:
        return _resize_linear(pixels, height, width)
    sides = [("bhwc,vw->bhvc", 2, width), ("bhwc,vh->bvwc", 1, height)]
    if is_height_first(pixels.shape[1:3], (height, width)):
        sides.reverse()
    for equation, axis, length in sides:
        if pixels.shape[axis] != length:
            matrix = resampling_matrix(pixels.shape[axis], length, resampling)
            resized = jnp.einsum(equation, pixels, matrix, precision="highest")
            pixels = jnp.clip(jnp.floor(255 * resized + 0.5), 0, 255) / 255
    return pixels


def _resize_linear(pixels: jax.Array, height: int, width: int) -> jax.Array:
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
