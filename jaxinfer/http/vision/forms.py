"""Bodies that are forms (multipart/form-data), as browsers and `curl -F` send files."""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Sequence
from email.message import Message

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message as AsgiMessage

from jaxinfer.http.bodies import Body, refusal_of
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.limits import Limits

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a bad form is refused, and no more than that

FIELDS = 64
"""Fields of a form that are no files."""


@dataclasses.dataclass(frozen=True)
class Form[Options: Body]:
    """The parts of a multipart body.

    Attributes:
      options: its fields that come once.
      lists: those that may come several times, by name.
      images: the contents of the files `image`.
    """

    options: Options
    lists: dict[str, list[str]]
    images: list[bytes]


def is_form(request: Request) -> bool:
    """Tell whether a request's body is a form."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"


def _check_end(request: Request, body: bytes) -> None:
    """Raise BadRequestError for a form without an end, of which Starlette would drop the last part."""
    header = Message()
    header["content-type"] = request.headers["content-type"]
    if not (boundary := header.get_boundary()) or not body.rstrip().endswith(f"--{boundary}--".encode()):
        raise BadRequestError("the body is no form: its boundary, or its end, is missing.")


async def read_form[Options: Body](
    request: Request, limits: Limits, kind: type[Options], lists: Sequence[str] = ()
) -> Form[Options]:
    """Read a form, in which numbers are written as text. Raises BadRequestError, naming the field.

    Args:
      request: a request with a form.
      limits: limits of bodies, and of images.
      kind: the type of the fields that come once.
      lists: the names of those that may come several times.
    """
    body, images = await limits.read_body(request), list[bytes]()
    _check_end(request, body)
    once, several = dict[str, str](), defaultdict[str, list[str]](list)

    async def receive() -> AsgiMessage:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        async with Request(request.scope, receive).form(
            max_files=limits.max_inputs, max_fields=FIELDS + limits.max_inputs
        ) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    if name != "image":
                        raise BadRequestError(f"{name} is no file of this endpoint; files are image.", param=name)
                    images.append(await value.read())
                elif name in lists:
                    several[name].append(value)
                elif name in once or name == "image":
                    why = "must be a file" if name == "image" else "comes twice"
                    raise BadRequestError(f"{name} {why}.", param=name)
                else:
                    once[name] = value
    except HTTPException as error:
        raise BadRequestError(f"the body is no form: {error.detail}") from None
    if not images:
        raise BadRequestError("image is missing; send at least one file.", param="image")
    try:
        return Form(msgspec.convert(once, kind, strict=False), several, images)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None
