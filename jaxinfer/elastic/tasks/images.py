"""Input images: checking them, and reading them from files."""

from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from jaxinfer.elastic.errors import InvalidImageError
from jaxinfer.fields import check
from jaxinfer.models.config import PreprocessingConfig
from jaxinfer.models.vision.image_files import fitted, read_image

SQUARE = PreprocessingConfig()
"""Resizing of models that do not say how: bilinear, without keeping the ratio."""
Side = Annotated[int, Meta(ge=1, le=2**14, description="an integer in [1, 2**14]")]
"""The height and width of images, in pixels."""


def check_images(images: object, size: int) -> np.ndarray:
    """Convert images to a batch, uint8 [B, size, size, 3].

    Args:
      images: one or several, RGB.
      size: height and width of the model's images.

    Raises InvalidImageError, which says what is wrong with them.
    """
    layout = f"uint8 [B, {size}, {size}, 3] (RGB)"
    try:
        array = np.asarray(images)
    except (TypeError, ValueError, OverflowError) as error:  # lists of different lengths
        raise InvalidImageError(f"images must be {layout}: {error}.") from None
    if array.dtype != np.uint8:
        unusable = " with NaN or infinity" if array.dtype.kind == "f" and not np.isfinite(array).all() else ""
        raise InvalidImageError(
            f"images must be {layout}, got {array.dtype.name}{unusable}: scale them to 0..255 and round."
        )
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.shape[1:] != (size, size, 3):
        raise InvalidImageError(
            f"images must be {layout}, got {list(array.shape)}: `jaxinfer.elastic.load_image` reads and resizes files."
        )
    return array


def load_image(path: str | Path, size: int, preprocessing: PreprocessingConfig = SQUARE) -> np.ndarray:
    """Read an image file, upright, resized and cropped for a model: uint8 [size, size, 3].

    Args:
      path: the file.
      size: height and width of the model's images, `config.image_size`.
      preprocessing: how the model resizes, `config.preprocessing`.

    Needs the extra `images`. 16-bit pixels keep their upper 8 bits. Raises InvalidImageError for other files, and for
    more than 50 million pixels.
    """
    size = check("size", size, Side)
    try:
        return fitted(read_image(path), size, preprocessing)
    except ValueError as error:
        raise InvalidImageError(str(error)) from error


def resize_images(images: np.ndarray, size: int, preprocessing: PreprocessingConfig = SQUARE) -> np.ndarray:
    """Resize images as `load_image` does: uint8 [N, H, W] or [N, H, W, 3] -> [N, size, size, 3]."""
    size = check("size", size, Side)
    colours = np.broadcast_to(images[..., None], (*images.shape, 3)) if images.ndim == 3 else images
    resized = [fitted(image, size, preprocessing) for image in colours]
    return np.array(resized, np.uint8).reshape(-1, size, size, 3)
