"""Responses that are JSON."""

import msgspec
from starlette.responses import Response


def json_response(content: object) -> Response:
    """The response with this content."""
    return Response(msgspec.json.encode(content), media_type="application/json")
