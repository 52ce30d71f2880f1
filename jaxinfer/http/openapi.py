"""`/openapi.json`: the server's endpoints and the bodies that they take, in the OpenAPI format."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from jaxinfer.http.adapters import LoadAdapterBody, UnloadAdapterBody
from jaxinfer.http.bodies import Body, ChatBody, CompletionBody
from jaxinfer.http.embeddings import EmbeddingBody
from jaxinfer.http.errors import Refusal
from jaxinfer.http.messages.bodies import CountTokensBody, MessagesBody
from jaxinfer.http.messages.errors import PATHS, MessageError
from jaxinfer.http.responses.bodies import ResponseBody
from jaxinfer.http.tokens import DetokenizeBody, TokenizeBody

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
"""The bodies of endpoints."""

_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Describe an application by its routes."""
    kinds = [*BODIES.values(), Refusal, MessageError]
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    known = dict(zip(kinds, references, strict=True))
    paths = {
        _PARAMETER.sub(r"{\1}", route.path): {
            method.lower(): _operation(route.path, known) for method in sorted(route.methods or ()) if method != "HEAD"
        }
        for route in routes
        if isinstance(route, Route) and route.include_in_schema
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": version("jaxinfer")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
        "security": [{}, *({name: []} for name in _KEYS)],  # a key only if the server has keys
    }


def _operation(path: str, known: dict[Any, Any]) -> dict[str, Any]:
    """Describe what a path does."""
    refusal = MessageError if path in PATHS else Refusal
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer."},
            "default": {
                "description": "An error.",
                "content": _json(known[refusal]),
            },
        }
    }
    if names := _PARAMETER.findall(path):
        schema = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if (body := BODIES.get(path)) is not None:
        operation["requestBody"] = {"required": True, "content": _json(known[body])}
    return operation


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
