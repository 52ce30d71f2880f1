"""Errors as the Messages API writes them."""

import msgspec

from jaxinfer.http.errors import describe

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
"""The endpoints whose errors have this form."""

TOO_LONG = "prompt is too long"
"""The words by which coding agents know that they must shorten the conversation."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageErrorBody(msgspec.Struct, kw_only=True):
    """The value of `error`."""

    type: str
    message: str


class MessageError(msgspec.Struct, kw_only=True, tag="error"):
    """The body of an answer that is an error."""

    error: MessageErrorBody
    request_id: str | None


def describe_message_error(
    error: Exception, request_id: str | None, content: str | None = None
) -> tuple[int, MessageError, dict[str, str]]:
    """Return the status of an error, its body, and headers; `content` as in `describe`."""
    status, body, headers = describe(error, content)
    message = body.message
    if body.code == "context_length_exceeded":
        message = f"{TOO_LONG}: {message}"
    elif body.param and body.param not in message:
        message = f"{body.param}: {message}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, MessageError(error=MessageErrorBody(type=kind, message=message), request_id=request_id), headers


def error_event(error: Exception, request_id: str | None) -> bytes:
    """The event of an error in the midst of a stream."""
    return b"event: error\ndata: " + msgspec.json.encode(describe_message_error(error, request_id)[1]) + b"\n\n"
