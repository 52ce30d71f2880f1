"""The application: its endpoints, and what every request passes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.bodies import ChatBody, CompletionBody, decode
from jaxinfer.http.connection import DisconnectedError, until_disconnect
from jaxinfer.http.embeddings import EmbeddingBody, embeddings
from jaxinfer.http.errors import BadRequestError, describe, encode_error
from jaxinfer.http.generation import Reply, chat_reply, completion_reply, respond
from jaxinfer.http.limits import Limits
from jaxinfer.http.metrics import Metrics
from jaxinfer.http.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize

Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """The endpoints of one model.

    Args:
      llm: the model; closed when the server ends.
      name: the name by which clients ask for it.
      limits: limits of clients.
    """

    def __init__(self, llm: AsyncLLM, name: str, limits: Limits):
        self.llm, self.name, self.limits, self.started = llm, name, limits, int(time.time())
        self.metrics, self.is_ready = Metrics(llm, name), True

    @property
    def adapters(self) -> list[str]:
        """The names of the model's LoRA adapters, which are models to clients."""
        adapters = self.llm.engine.adapters
        return [] if adapters is None else adapters.names

    def find(self, model: str) -> tuple[str, str | None]:
        """Return a model's name, and its adapter. Raises BadRequestError for an unknown model."""
        if model in ("", self.name):
            return self.name, None
        if model in self.adapters:
            return model, model
        known = ", ".join([self.name, *self.adapters])
        raise BadRequestError(
            f"there is no model {model!r}; models: {known}.", param="model", status=404, code="model_not_found"
        )

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = decode(await self.limits.read_body(request), CompletionBody)
        return await self._respond(request, completion_reply(self.llm, body, *self.find(body.model), self.limits))

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = decode(await self.limits.read_body(request), ChatBody)
        return await self._respond(request, chat_reply(self.llm, body, *self.find(body.model), self.limits))

    async def _respond(self, request: Request, reply: Reply) -> Response:
        def count() -> None:
            for snapshot in reply.newest.values():
                self.metrics.ended(snapshot.output())

        return await respond(request, reply, count)

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        body = decode(await self.limits.read_body(request), EmbeddingBody)
        work = embeddings(self.llm, body, *self.find(body.model), self.limits)
        return _json(await until_disconnect(request.receive, work))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = decode(await self.limits.read_body(request), TokenizeBody)
        self.find(body.model)
        return _json(await tokenize(self.llm, body))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = decode(await self.limits.read_body(request), DetokenizeBody)
        self.find(body.model)
        return _json(detokenize(self.llm, body))

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return _json({"object": "list", "data": [self._model(name) for name in (self.name, *self.adapters)]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        name, _ = self.find(request.path_params["model"])
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        described: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "jaxinfer",
            "max_model_len": self.llm.engine.config.context,
        }
        return described if name == self.name else {**described, "parent": self.name}

    async def health(self, request: Request) -> Response:
        """`GET /health`: whether the process lives."""
        return Response(status_code=200 if self.llm.is_running else 503)

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: whether requests are taken."""
        return Response(status_code=200 if self.is_ready and self.llm.is_running else 503)

    async def show_metrics(self, request: Request) -> Response:
        """`GET /metrics`, in Prometheus' format."""
        content, kind = self.metrics.expose()
        return Response(content, headers={"Content-Type": kind})

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return _json({"version": version("jaxinfer")})

    def guarded(self, path: str, handler: Handler, *methods: str) -> Route:
        """A route behind the check of keys. Errors are responses, and responses are counted."""

        async def handle(request: Request) -> Response:
            try:
                self.limits.check_key(request)
                response = await handler(request)
            except DisconnectedError:
                response = Response(status_code=499)
            except Exception as error:
                response = error_response(error)
            self.metrics.responded(path, response.status_code)
            return response

        return Route(path, handle, methods=list(methods or ("GET",)))


def make_app(llm: AsyncLLM, name: str, limits: Limits) -> Starlette:
    """Make the application of a model; see `jaxinfer.http.app`."""
    server = Server(llm, name, limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        server.is_ready = False
        await asyncio.to_thread(llm.close, drain=True)

    routes = [
        server.guarded("/v1/completions", server.completions, "POST"),
        server.guarded("/v1/chat/completions", server.chat, "POST"),
        server.guarded("/v1/embeddings", server.embeddings, "POST"),
        server.guarded("/v1/models", server.models),
        server.guarded("/v1/models/{model:path}", server.model),
        server.guarded("/tokenize", server.tokenize, "POST"),
        server.guarded("/detokenize", server.detokenize, "POST"),
        Route("/metrics", server.show_metrics),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/version", server.version),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _unknown, 405: _unknown})


def error_response(error: Exception) -> Response:
    """The response to a request that ended with an error."""
    status, body, headers = describe(error)
    return Response(encode_error(body), status, headers, "application/json")


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path}"
    return error_response(BadRequestError(f"there is no endpoint {what}.", status=status, code="not_found"))


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
