"""Images outside of programs: read from files, and resized for a model, with Pillow (the extra `images`)."""

import contextlib
import io
import math
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from jaxinfer.extras import require_extra
from jaxinfer.models.config import PreprocessingConfig, Resampling
from jaxinfer.models.vision.images import GREY, Letterbox, is_height_first, resized_shape

if TYPE_CHECKING:
    from PIL import Image

type AnyImage = np.ndarray | Image.Image | str | Path
"""Pixels, uint8 [H, W, 3], RGB; an image of Pillow; or a file."""

MAX_PIXELS = 50_000_000
"""Maximum pixels of an image file.

Larger ones are not decoded, since a small file can hold an image that fills the memory.
"""

KERNEL = 3
"""Half the width of the widest kernel, Lanczos, in pixels of the larger of image and result."""

RATIO = 8
"""Ratio of a resized side to the crop up to which the side is resized whole, which gives Pillow's result to the bit.

If a side is longer, only the part that the crop keeps is resized. Pillow places such a part in single precision, so one
pixel in 10,000 may differ by a level or two, where rounding is a tie.
"""

WHOLE_BYTES = 2 << 20
"""Memory up to which all colours are resized at once, which is several times as fast for small images."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats of image files that are read: those that Pillow decodes itself, and that hold nothing but pixels."""

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
"""Ends of the names of files that are images, in a folder."""


_opening = threading.Lock()  # filters of warnings are those of all threads


class TooManyPixelsError(ValueError):
    """An image that is too large to be decoded."""


def read_image(file: str | Path | bytes, *, name: str | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read an image file, upright: uint8 [H, W, 3].

    16-bit pixels keep their upper 8 bits.

    Args:
      file: the file, or its content.
      name: what errors call it; None: the file's path.
      max_pixels: pixels of the largest image that is decoded.

    Raises TooManyPixelsError; ValueError if it is not an image of one of `FORMATS`; MissingExtraError without Pillow.
    """
    name = name or ("the image" if isinstance(file, bytes) else str(file))
    with _opened(file, name, max_pixels) as image:
        from PIL import ImageOps

        return _rgb(ImageOps.exif_transpose(image), name, file_format=image.format)


def check_image_file(path: str | Path) -> None:
    """Raise the errors of `read_image` that the beginning of a file shows, without decoding its pixels."""
    with _opened(path, str(path), MAX_PIXELS):
        pass


@contextlib.contextmanager
def _opened(file: str | Path | bytes, name: str, max_pixels: int) -> Iterator[Any]:
    """Open an image file with Pillow. Raises the errors of `read_image`, also for what fails inside the block."""
    require_extra("PIL", "reading image files")
    from PIL import Image, UnidentifiedImageError

    try:
        with _opening, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_pixels decides
            opened = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS)
        with opened as image:
            width, height = image.size
            if width * height > max_pixels:
                raise TooManyPixelsError(
                    f"{name}: {width} x {height} are more than {max_pixels} pixels; make the image smaller."
                )
            yield image
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file.") from None
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(f"{name}: too many pixels ({error}).") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{name}: not an image that can be read (it is none of {', '.join(FORMATS)}).") from error
    except (OSError, SyntaxError) as error:
        reason = getattr(error, "strerror", None) or error  # without a path, which has another name here
        raise ValueError(f"{name}: not an image that can be read ({reason}).") from error


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


def _rgb(image: Any, name: str | Path, *, file_format: str | None = None) -> np.ndarray:
    """Convert an image of Pillow: uint8 [H, W, 3].

    Args:
      name: what errors call it.
      file_format: of the file that it comes from.
    """
    from PIL import Image

    if image.mode[0] in "IF":  # 16 or 32 bits, which `convert` would cut off at 255
        # Mode I has pixels of 32 bits, whatever was put there; of PPM files it has 16-bit ones.
        may_have_8_bits = image.mode == "I" and file_format != "PPM"
        image = Image.fromarray(_upper_bits(np.asarray(image), name, may_have_8_bits=may_have_8_bits))
    return np.asarray(image.convert("RGB"))


def _upper_bits(pixels: np.ndarray, name: str | Path, *, may_have_8_bits: bool) -> np.ndarray:
    """Convert 16-bit pixels to uint8. may_have_8_bits: whether those up to 255 are 8-bit ones."""
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise ValueError(f"{name}: pixels are {pixels.dtype.name}; save the image with 8 or 16 bits a channel.")
    has_8_bits = may_have_8_bits and pixels.max() <= 0xFF
    return (pixels if has_8_bits else pixels >> 8).astype(np.uint8)


def fitted(image: np.ndarray, size: int, cfg: PreprocessingConfig) -> np.ndarray:
    """Resize and crop an image for a model: uint8 [H, W, 3] -> [size, size, 3].

    `Resampling.LINEAR` is Pillow's bilinear here. The result is that of Pillow 13, and takes at most the memory of
    another image and of four results, whatever the image's ratio. Raises ValueError for another size where the config
    resizes none, MissingExtraError without Pillow.
    """
    height, width = image.shape[:2]
    if cfg.resampling is None:
        if (height, width) != (size, size):
            raise ValueError(f"the image must be {size} x {size}, got {height} x {width}: the model resizes none.")
        return image
    resized = resized_shape(height, width, size, cfg)
    sides = [_Side.middle(length, to, size) for length, to in zip((height, width), resized, strict=True)]
    return _resize(image, sides, cfg.resampling, height_first=is_height_first((height, width), resized))


def unfitted(boxes: np.ndarray, shape: tuple[int, int], size: int, cfg: PreprocessingConfig) -> np.ndarray:
    """Move boxes from the result of `fitted` to the image that it was made from.

    Args:
      boxes: left, top, right and bottom in the result's pixels, float [N, 4].
      shape: the image's height and width.
      size: as in `fitted`.
      cfg: as in `fitted`.

    Returns: float [N, 4], inside the image.
    """
    height, width = shape
    if cfg.resampling is None:
        return boxes
    resized_height, resized_width = resized_shape(height, width, size, cfg)
    border = (resized_width - size) // 2, (resized_height - size) // 2
    return _moved(boxes, border, (width / resized_width, height / resized_height), shape)


def letterboxed(image: np.ndarray, size: int) -> np.ndarray:
    """Resize an image for a detector, into the middle of a grey square: uint8 [H, W, 3] -> [size, size, 3].

    The memory, and errors, are those of `fitted`.
    """
    box = Letterbox.fit(image.shape[0], image.shape[1], size)
    if (box.height, box.width) == (size, size) == image.shape[:2]:
        return image
    sides = [
        _Side(slice(length), 0.0, length / to, to, slice(to))
        for length, to in zip(image.shape, (box.height, box.width), strict=False)
    ]
    first = is_height_first(image.shape, (box.height, box.width))
    square = np.full((size, size, 3), round(255 * GREY), np.uint8)
    square[box.top : box.top + box.height, box.left : box.left + box.width] = _resize(
        image, sides, Resampling.BILINEAR, height_first=first
    )
    return square


def unletterboxed(boxes: np.ndarray, shape: tuple[int, int], size: int) -> np.ndarray:
    """Move boxes from the result of `letterboxed` to the image that it was made from; as `unfitted` does."""
    height, width = shape
    box = Letterbox.fit(height, width, size)
    return _moved(boxes, (-box.left, -box.top), (width / box.width, height / box.height), shape)


def _moved(boxes: np.ndarray, begin: tuple[int, int], scale: tuple[float, float], shape: tuple[int, int]) -> np.ndarray:
    """Add `begin` (x, y) to boxes, multiply them by `scale` (x, y), and keep them inside an image [height, width]."""
    moved = (boxes + np.tile(begin, 2)) * np.tile(scale, 2)
    return np.clip(moved, 0, np.tile(shape[::-1], 2))


def _resize(image: np.ndarray, sides: "Sequence[_Side]", resampling: Resampling, *, height_first: bool) -> np.ndarray:
    """Resize and crop both sides of an image, uint8 [H, W, 3]."""
    image = image[sides[0].taken, sides[1].taken]
    if all(side.scale == 1 for side in sides):
        return image[sides[0].kept, sides[1].kept]
    require_extra("PIL", "resizing images")
    if 4 * max(image.shape[0], sides[0].length) * max(image.shape[1], sides[1].length) <= WHOLE_BYTES:
        return _resize_whole(image, sides, resampling)
    height, width = (len(range(side.length)[side.kept]) for side in sides)
    weight_bytes = max(image.shape[0] * image.shape[1], 3 * height * width)
    result = np.empty((height, width, 3), np.uint8)
    for colour in range(3):  # one at a time, since copies and intermediate results take memory
        pixels = image[..., colour]
        for axis in (0, 1) if height_first else (1, 0):
            pixels = _resize_side(pixels, axis, sides[axis], resampling, weight_bytes)
        result[..., colour] = pixels
    return result


def _resize_whole(image: np.ndarray, sides: "Sequence[_Side]", resampling: Resampling) -> np.ndarray:
    """Resize an image at once, and crop it."""
    from PIL import Image

    (low, high), (height, width) = zip(*(side.box for side in sides), strict=True), (side.length for side in sides)
    box = low[1], low[0], min(high[1], image.shape[1]), min(high[0], image.shape[0])
    resized = np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize((width, height), _kernel(resampling), box))
    return resized[sides[0].kept, sides[1].kept]


class _Side(NamedTuple):
    """One side of an image that is resized and cropped.

    Attributes:
      taken: the pixels of the image that are resized.
      begin: where resizing begins in these.
      scale: pixels of the image for one of the result.
      length: pixels after resizing.
      kept: which of them the crop keeps.
    """

    taken: slice
    begin: float
    scale: float
    length: int
    kept: slice

    @property
    def box(self) -> tuple[float, float]:
        """Where resizing begins and ends in the pixels that are taken."""
        return self.begin, self.begin + self.length * self.scale

    @classmethod
    def middle(cls, length: int, resized: int, size: int) -> Self:
        """Return a side of `length` pixels that is resized, and of which `size` pixels in the middle are kept."""
        scale, first = length / resized, (resized - size) // 2
        if resized <= RATIO * size:
            return cls(slice(length), 0.0, scale, resized, slice(first, first + size))
        return cls(*_taken(length, first * scale, (first + size) * scale, scale), scale, size, slice(size))


def _taken(length: int, begin: float, end: float, scale: float) -> tuple[slice, float]:
    """Return the pixels of a side that resizing a part of it takes, and where the part begins in these."""
    margin = KERNEL * max(scale, 1.0) + 1
    low, high = max(0, math.floor(begin - margin)), min(length, math.ceil(end + margin))
    return slice(low, high), begin - low


def _resize_side(pixels: np.ndarray, axis: int, side: _Side, resampling: Resampling, weight_bytes: int) -> np.ndarray:
    """Resize and crop one side of one colour, [H, W], in parts for which Pillow's weights fit in `weight_bytes`."""
    from PIL import Image

    kernel = _kernel(resampling)
    at_once, parts = max(1, weight_bytes // (8 * 2 * KERNEL * math.ceil(max(side.scale, 1.0)))), []
    for first in range(0, side.length if side.scale != 1 else 0, at_once):
        count = min(at_once, side.length - first)
        begin, end = side.begin + first * side.scale, side.begin + (first + count) * side.scale
        taken, begin = _taken(pixels.shape[axis], begin, end, side.scale)
        part = pixels[taken] if axis == 0 else pixels[:, taken]
        shape, low, high = list(part.shape), [0.0, 0.0], [float(length) for length in part.shape]
        shape[axis], low[axis], high[axis] = count, begin, min(begin + count * side.scale, part.shape[axis])
        box = low[1], low[0], high[1], high[0]
        parts.append(np.asarray(Image.fromarray(np.ascontiguousarray(part)).resize(shape[::-1], kernel, box)))
    pixels = np.concatenate(parts, axis) if parts else pixels
    return pixels[side.kept] if axis == 0 else pixels[:, side.kept]


def _kernel(resampling: Resampling) -> Any:
    """Return Pillow's name of a way to resize."""
    from PIL import Image

    return Image.Resampling["BILINEAR" if resampling is Resampling.LINEAR else resampling.name]
