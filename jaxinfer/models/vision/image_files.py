"""Images outside of programs: read from files, and resized for a model, with Pillow (the extra `images`)."""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.extras import require_extra
from jaxinfer.models.config import PreprocessingConfig, Resampling
from jaxinfer.models.vision.images import resized_shape

if TYPE_CHECKING:
    from PIL import Image

type AnyImage = np.ndarray | Image.Image | str | Path
"""Pixels, uint8 [H, W, 3], RGB; an image of Pillow; or a file."""

MAX_PIXELS = 50_000_000
"""Maximum pixels of an image file.

Larger ones are not decoded, since a small file can hold an image that fills the memory.
"""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats of image files that are read: those that Pillow decodes itself, and that hold nothing but pixels."""


def read_image(path: str | Path) -> np.ndarray:
    """Read an image file, upright: uint8 [H, W, 3].

    16-bit pixels keep their upper 8 bits. Raises ValueError if it is not an image of one of `FORMATS`, or has more than
    `MAX_PIXELS`; MissingExtraError without Pillow.
    """
    require_extra("PIL", "reading image files")
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is stricter
        try:
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise ValueError(
                        f"{path}: {width} x {height} are more than {MAX_PIXELS} pixels; make the image smaller."
                    )
                return _rgb(ImageOps.exif_transpose(image), path)
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file.") from None
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
            raise ValueError(f"{path}: not an image that can be read ({error}).") from error


def pixels_of(image: AnyImage) -> np.ndarray:
    """Convert an image to pixels, uint8 [H, W, 3]. Raises ValueError for anything else."""
    if isinstance(image, str | Path):
        return read_image(image)
    if is_pillow(image):
        return _rgb(image, "the image")
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] != 3 or not pixels.size:
        raise ValueError(f"an image must be uint8 [H, W, 3] (RGB), got {pixels.dtype.name} {list(pixels.shape)}.")
    return pixels


def is_pillow(image: object) -> bool:
    """Tell whether this is an image of Pillow, without importing it: whoever made one has."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(image, module.Image)


def _rgb(image: Any, name: str | Path) -> np.ndarray:
    """Convert an image of Pillow: uint8 [H, W, 3]. name: what errors call it."""
    from PIL import Image

    if image.mode[0] in "IF":  # 16 or 32 bits, which `convert` would cut off at 255
        image = Image.fromarray(_upper_bits(np.asarray(image), name))
    return np.asarray(image.convert("RGB"))


def _upper_bits(pixels: np.ndarray, name: str | Path) -> np.ndarray:
    """Convert 16-bit pixels to uint8. In Pillow's mode I, of 32 bits, pixels up to 255 are 8-bit ones."""
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise ValueError(f"{name}: pixels are {pixels.dtype.name}; save the image with 8 or 16 bits a channel.")
    has_8_bits = pixels.dtype != np.uint16 and pixels.max() <= 0xFF
    return (pixels if has_8_bits else pixels >> 8).astype(np.uint8)


def fitted(image: np.ndarray, size: int, cfg: PreprocessingConfig) -> np.ndarray:
    """Resize and crop an image for a model: uint8 [H, W, 3] -> [size, size, 3].

    `Resampling.LINEAR` is Pillow's bilinear here. Raises ValueError for another size where the config resizes none,
    MissingExtraError without Pillow.
    """
    height, width = image.shape[:2]
    if cfg.resampling is None:
        if (height, width) != (size, size):
            raise ValueError(f"the image must be {size} x {size}, got {height} x {width}: the model resizes none.")
        return image
    height, width = resized_shape(height, width, size, cfg)
    if image.shape[:2] != (height, width):
        require_extra("PIL", "resizing images")
        from PIL import Image

        bilinear = cfg.resampling is Resampling.LINEAR
        kernel = Image.Resampling["BILINEAR" if bilinear else cfg.resampling.name]
        image = np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize((width, height), kernel))
    top, left = (height - size) // 2, (width - size) // 2
    return image[top : top + size, left : left + size]
