"""Errors as the OpenAI API writes them, and the status of each."""

import dataclasses
import logging
import math
import re

import msgspec

from jaxinfer.experts.errors import LoadError
from jaxinfer.generation.engine.output import NO_TOKEN_MESSAGE
from jaxinfer.generation.params import SamplingParams
from jaxinfer.serving import (
    ClosedError,
    DeadlineExceededError,
    DiedError,
    FailedError,
    NotLoadedError,
    OverloadedError,
    ShedError,
)
from jaxinfer.text.chat_template import ChatOptions

log = logging.getLogger(__name__)

_OWNER = re.compile(r"^(SamplingParams|StructuredOutputsParams|PoolingParams)\.(\w+)")
_HOLDER = re.compile(r"^This \w+")  # a class of ours, which clients do not know
_WORD = re.compile(r"^\w+")
_OPTIONS = (
    {field.name for field in dataclasses.fields(SamplingParams)} | ChatOptions.__annotations__.keys() | {"messages"}
)
_TOO_LONG = re.compile(r"leaves no room to generate|far more than the context")
_UNSATISFIABLE = (NO_TOKEN_MESSAGE, "No token of the model may follow", "The grammar cannot be followed")
"""How the errors begin of requests whose own options leave no token to choose."""
LOADING_SECONDS = 5
"""Seconds after which a client may try again to ask a model that is being loaded, if nothing better is known."""
_MAX_CHARACTERS = 1000  # of a message, which may quote a body of megabytes


class BadRequestError(ValueError):
    """A request that is refused.

    Attributes:
      status: the HTTP status.
      param: the field that is wrong.
      code: a word for programs.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class ErrorBody(msgspec.Struct, kw_only=True):
    """The value of `error`."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class Refusal(msgspec.Struct):
    """The body of every answer that is an error."""

    error: ErrorBody


def describe(error: Exception, content: str | None = None) -> tuple[int, ErrorBody, dict[str, str]]:
    """Return the status of an error, its body, and headers.

    Args:
      content: the field with the endpoint's texts, which a ValueError is about that names no other.
    """
    match error:
        case BadRequestError():
            return error.status, _body(str(error), "invalid_request_error", error.param, error.code), {}
        case OverloadedError():
            wait = 1 if error.retry_after is None else max(1, math.ceil(error.retry_after))
            return 429, _body(str(error), "rate_limit_error", None, "overloaded"), {"Retry-After": str(wait)}
        case ShedError():
            return 408, _body(str(error), "timeout_error", None, "shed"), {}
        case DeadlineExceededError():
            return 408, _body(str(error), "timeout_error", None, "timeout"), {}
        case NotLoadedError():
            wait = LOADING_SECONDS if error.retry_after is None else max(1, math.ceil(error.retry_after))
            return 503, _body(str(error), "server_error", None, "loading"), {"Retry-After": str(wait)}
        case ClosedError() | DiedError():
            message = _HOLDER.sub("The model", str(error))
            return 503, _body(message, "server_error", None, "unavailable"), {"Retry-After": "1"}
        case LoadError():  # whose text has paths
            log.error("An expert cannot be loaded: %s", error)
            return (
                500,
                _body("An expert cannot be loaded; see the server's log.", "server_error", None, "failed"),
                {},
            )
        case FailedError() if str(error).startswith(_UNSATISFIABLE):
            return 400, _body(str(error), "invalid_request_error", None, "unsatisfiable"), {}
        case FailedError():
            return 500, _body(str(error), "server_error", None, "failed"), {}
        case ValueError():
            message = str(error)
            code = "context_length_exceeded" if _TOO_LONG.search(message) else None
            field = _field(message)
            if field in (None, "messages"):  # which other APIs of chats have under another name
                field = content or field
            return 400, _body(_OWNER.sub(r"\2", message), "invalid_request_error", field, code), {}
    log.error("A request has failed.", exc_info=error)
    return 500, _body("The server has failed at this request.", "server_error", None, "internal_error"), {}


def _field(message: str) -> str | None:
    """The field that the message of a ValueError names."""
    if owner := _OWNER.match(message):
        return "structured_outputs" if owner.group(1) == "StructuredOutputsParams" else owner.group(2)
    if message.startswith("The grammar"):
        return "structured_outputs"
    return word.group() if (word := _WORD.match(message)) and word.group() in _OPTIONS else None


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return ErrorBody(message=_cut(message), type=kind, param=param and _cut(param), code=code)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def encode_error(body: ErrorBody) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode(Refusal(body))
