"""Responses that are errors, each in the form of its API."""

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from jaxinfer.http.errors import describe, encode_error
from jaxinfer.http.messages.errors import PATHS, describe_message_error
from jaxinfer.http.records import request_id


def error_response(error: Exception, scope: Scope, content: str | None = None) -> Response:
    """The response to a request that ended with an error; `content` as in `describe`."""
    if scope["path"].endswith(PATHS):
        status, refusal, headers = describe_message_error(error, request_id(scope), content)
        return Response(msgspec.json.encode(refusal), status, headers, "application/json")
    status, body, headers = describe(error, content)
    return Response(encode_error(body), status, headers, "application/json")
