"""Images in requests: base64, uploaded, or a file in one of the server's folders. Nothing is ever fetched."""

import asyncio
import base64
import binascii
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from jaxinfer.disk_cache.processor import usable_cores
from jaxinfer.extras import MissingExtraError
from jaxinfer.fields import shown
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.folders import find_inside
from jaxinfer.models.vision.image_files import TooManyPixelsError, read_image
from jaxinfer.serving import OverloadedError

MAX_WAITING = 1024
"""Images that wait to be decoded, beyond which more are refused."""

type Source = bytes | str | Path
"""An encoded image, its base64, or its file."""

_URL = re.compile(r"[a-zA-Z][\w+.-]{0,30}:")


class ImageFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An image on the server.

    Attributes:
      file: its path, in one of the image folders: from there, or absolute.
    """

    file: str


def source_of(image: str | ImageFile, place: str, folders: Sequence[Path]) -> Source:
    """Find out where an image comes from. Raises BadRequestError for a URL, and for a file that clients may not name.

    Args:
      image: a data URL, plain base64, or a file.
      place: the field that it comes from.
      folders: the image folders.
    """
    if isinstance(image, ImageFile):
        if not folders:
            raise BadRequestError(
                f"{place}: the server reads no image files: set image_folders in its config.", param=place, status=403
            )
        path = find_inside(folders, image.file, place, "images")
        if not os.path.isfile(path):  # which raises nothing for a path that is too long
            raise BadRequestError(f"{place}: {shown(image.file)}: no such file.", param=place)
        return path
    if image[:5].lower() == "data:":
        header, _, content = image.partition(",")
        if not header.lower().endswith(";base64"):
            raise BadRequestError(f"{place}: a data URL must have base64, as data:image/png;base64,...", param=place)
        return content
    if _URL.match(image):
        raise BadRequestError(f"{place}: URLs are not fetched; send the image itself, as base64.", param=place)
    return image


def decode_image(source: Source, place: str, max_pixels: int) -> np.ndarray:
    """Decode an image, upright: uint8 [H, W, 3]. Raises BadRequestError; MissingExtraError without Pillow.

    Args:
      source: the image.
      place: the field that it comes from.
      max_pixels: pixels of the largest image that is decoded; the error of a larger one has status 413.
    """
    if isinstance(source, str):
        try:
            source = base64.b64decode(source, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadRequestError(f"{place}: not base64 ({error}).", param=place) from None
    try:
        return read_image(source, name=place, max_pixels=max_pixels)
    except TooManyPixelsError as error:
        raise BadRequestError(str(error), param=place, status=413, code="image_too_large") from error
    except ValueError as error:
        raise BadRequestError(str(error), param=place, code="invalid_image") from error
    except (MissingExtraError, MemoryError):
        raise
    except Exception as error:  # files can be broken in any way
        message = f"{place}: not an image that can be read ({type(error).__name__})."
        raise BadRequestError(message, param=place, code="invalid_image") from error


class ImageThreads:
    """Threads that decode images, as many as cores. It belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(usable_cores(), "jaxinfer-images")
        self._waiting = 0

    async def run[Result](self, work: Callable[[], Result]) -> Result:
        """Call a function in a thread. Raises OverloadedError if too many wait."""
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._waiting} images wait to be decoded; try again later.")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads, once they have done what they have."""
        self._threads.shutdown(wait=False)
