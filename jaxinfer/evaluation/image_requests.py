"""Requests with images to a server, and its answers."""

import io
from typing import Any

import httpx2
import numpy as np

from jaxinfer.extras import require_extra
from jaxinfer.serving.errors import FailedError


def headers_of(api_key: str | None) -> dict[str, str]:
    """The headers of requests with a key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def list_at(http: httpx2.Client, url: str, path: str) -> list[dict[str, Any]]:
    """Ask a server for a list. Raises ValueError if it cannot be asked."""
    try:
        return checked(http.get(path))["data"]
    except (httpx2.HTTPError, FailedError, KeyError) as error:
        raise ValueError(f"{url}{path}: {error}") from error


def checked(answer: httpx2.Response) -> dict[str, Any]:
    """The JSON of an answer. Raises FailedError for one that is an error."""
    try:
        body = answer.json()
        if answer.status_code != 200:
            raise FailedError(f"HTTP {answer.status_code}: {body['error']['message']}")
    except (ValueError, KeyError, TypeError) as error:
        raise FailedError(f"HTTP {answer.status_code}: {answer.text[:200]}") from error
    return body


def encoded(pixels: np.ndarray) -> bytes:
    """Encode an image, uint8 [H, W, 3], as a PNG. Raises MissingExtraError without Pillow."""
    require_extra("PIL", "sending images")
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()
