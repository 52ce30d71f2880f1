"""`/openapi.json`: the server's endpoints and the bodies that they take, in the OpenAPI format."""

import re
from collections import defaultdict
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
from jaxinfer.http.vision.elastic import QueryBody, QueryOptions, RegisterBody
from jaxinfer.http.vision.experts import InferBody, InferOptions

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/v1/experts/infer": InferBody,
    "/v1/elastic/query": QueryBody,
    "/v1/elastic/tasks": RegisterBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
"""The bodies of endpoints."""

FORMS: dict[str, tuple[type[Body], tuple[str, ...]]] = {
    "/v1/experts/infer": (InferOptions, ("kind",)),
    "/v1/elastic/query": (QueryOptions, ()),
}
"""The fields of endpoints that also take forms, and those of them that may come several times, besides the files."""

_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Describe an application by its routes."""
    kinds = [*BODIES.values(), Refusal, MessageError]
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    known = dict(zip(kinds, references, strict=True))
    paths = defaultdict[str, dict[str, Any]](dict)
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths[_PARAMETER.sub(r"{\1}", route.path)][method.lower()] = _operation(route.path, method, known)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": version("jaxinfer")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
        "security": [{}, *({name: []} for name in _KEYS)],  # a key only if the server has keys
    }


def _operation(path: str, method: str, known: dict[Any, Any]) -> dict[str, Any]:
    """Describe what a method of a path does."""
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
    if method == "POST" and (body := BODIES.get(path)) is not None:
        content = _json(known[body])
        if path in FORMS:
            content["multipart/form-data"] = {"schema": _form(*FORMS[path])}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _form(options: type[Body], lists: Sequence[str]) -> dict[str, Any]:
    """The schema of a form. lists: fields that may come several times."""
    _, schemas = msgspec.json.schema_components([options])
    schema = schemas[options.__name__]
    several = {name: {"type": "array", "items": {"type": "string"}} for name in lists} | {"image": _FILES}
    required = [*schema.get("required", ()), *several]
    return schema | {"properties": schema["properties"] | several, "required": required}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
