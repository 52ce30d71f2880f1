"""Input images: checking them, and reading them from files."""

import warnings
from pathlib import Path

import numpy as np

from jaxinfer.elastic.errors import InvalidImageError
from jaxinfer.extras import require_extra

MAX_PIXELS = 50_000_000
"""Maximum pixels of an image file.

Larger ones are not decoded, since a small file can hold an image that fills the memory.
"""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats of image files that are read: those that Pillow decodes itself, and that hold nothing but pixels."""


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


def load_image(path: str | Path, size: int) -> np.ndarray:
    """Read an image file, upright and resized without keeping its ratio: uint8 [size, size, 3].

    Needs the extra `images`. 16-bit pixels keep their upper 8 bits. Raises InvalidImageError if it is not an image of
    one of `FORMATS`, or has more than `MAX_PIXELS`.
    """
    require_extra("PIL", "reading image files")
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is stricter
        try:
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise InvalidImageError(
                        f"{path}: {width} x {height} are more than {MAX_PIXELS} pixels; make the image smaller."
                    )
                upright = ImageOps.exif_transpose(image)
                if upright.mode[0] in "IF":  # 16 or 32 bits, which `convert` would cut off at 255
                    upright = Image.fromarray(_upper_bits(np.asarray(upright), path))
                return np.asarray(upright.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
        except FileNotFoundError:
            raise InvalidImageError(f"{path}: no such file.") from None
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
            raise InvalidImageError(f"{path}: not an image that can be read ({error}).") from error


def _upper_bits(pixels: np.ndarray, path: str | Path) -> np.ndarray:
    """Convert 16-bit pixels to uint8."""
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise InvalidImageError(f"{path}: pixels are {pixels.dtype.name}; save the image with 8 or 16 bits a channel.")
    return (pixels >> 8).astype(np.uint8)


def resize_images(images: np.ndarray, size: int) -> np.ndarray:
    """Resize images, bilinear: uint8 [N, H, W] or [N, H, W, 3] -> [N, size, size, 3]. Needs the extra `images`."""
    require_extra("PIL", "resizing images")
    from PIL import Image

    resized = [
        np.asarray(Image.fromarray(image).convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
        for image in images
    ]
    return np.array(resized, np.uint8).reshape(-1, size, size, 3)
