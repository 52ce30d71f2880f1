"""Errors as the OpenAI API writes them, and the status of each."""

import logging
import math
import re

import msgspec

from jaxinfer.serving import ClosedError, DeadlineExceededError, DiedError, FailedError, OverloadedError

log = logging.getLogger(__name__)

_OWNER = re.compile(r"^(SamplingParams|StructuredOutputsParams|PoolingParams)\.(\w+)")


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


class LoadingError(Exception):
    """A model that a request asks for is not loaded yet."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """The value of `error`."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


def describe(error: Exception) -> tuple[int, ErrorBody, dict[str, str]]:
    """Return the status of an error, its body, and headers."""
    match error:
        case BadRequestError():
            return error.status, _body(str(error), "invalid_request_error", error.param, error.code), {}
        case OverloadedError():
            wait = 1 if error.retry_after is None else max(1, math.ceil(error.retry_after))
            return 429, _body(str(error), "rate_limit_error", None, "overloaded"), {"Retry-After": str(wait)}
        case DeadlineExceededError():
            return 408, _body(str(error), "timeout_error", None, "timeout"), {}
        case LoadingError():
            return 503, _body(str(error), "server_error", None, "loading"), {"Retry-After": "5"}
        case ClosedError() | DiedError():
            return 503, _body(str(error), "server_error", None, "unavailable"), {"Retry-After": "1"}
        case FailedError():
            return 500, _body(str(error), "server_error", None, "failed"), {}
        case ValueError():
            owner = _OWNER.match(message := str(error))
            param = owner and owner.group(2)
            return 400, _body(_OWNER.sub(r"\2", message), "invalid_request_error", param, None), {}
    log.error("A request has failed.", exc_info=error)
    return 500, _body("The server has failed at this request.", "server_error", None, "internal_error"), {}


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return ErrorBody(message=message, type=kind, param=param, code=code)


def encode_error(body: ErrorBody) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode({"error": body})
