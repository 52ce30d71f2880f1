"""The application: its endpoints, and what every request passes."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.http.bodies import ChatBody, CompletionBody, decode
from jaxinfer.http.chats import begin_chat, encode_chat
from jaxinfer.http.connection import DisconnectedError, until_disconnect
from jaxinfer.http.draining import Drain
from jaxinfer.http.embeddings import EmbeddingBody, embeddings
from jaxinfer.http.error_responses import error_response
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.generation import AnyReply, chat_reply, completion_reply, respond
from jaxinfer.http.json_response import json_response
from jaxinfer.http.limits import Limits
from jaxinfer.http.memory import MemoryFamilies, ResidencyFamilies
from jaxinfer.http.messages.bodies import CountTokensBody, MessagesBody
from jaxinfer.http.messages.conversation import chat_of
from jaxinfer.http.messages.errors import PATHS
from jaxinfer.http.messages.reply import MessageReply
from jaxinfer.http.metrics import Metrics
from jaxinfer.http.model_endpoints import ModelEndpoints
from jaxinfer.http.openapi import document
from jaxinfer.http.page_routes import page_routes
from jaxinfer.http.records import Records, Sink, note, request_id
from jaxinfer.http.responses.bodies import ResponseBody
from jaxinfer.http.responses.reply import response_reply
from jaxinfer.http.responses.store import ResponseStore
from jaxinfer.http.served_models import ModelChoice, ServedModels
from jaxinfer.http.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from jaxinfer.http.vision.endpoints import VisionEndpoints
from jaxinfer.http.vision.metrics import ServiceFamilies, SystemFamilies
from jaxinfer.http.vision.served import ServedService, ServedSystem

CONTENT = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
    **dict.fromkeys(PATHS, "messages"),
}
"""The fields with the texts of endpoints."""
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """The endpoints of a server.

    Args:
      models: the models; closed when the server ends.
      limits: limits of clients.
      systems: systems of experts.
      services: elastic services.
      keep_billing_header: as in `ServerConfig`.
    """

    def __init__(
        self,
        models: ServedModels,
        limits: Limits,
        *,
        systems: Sequence[ServedSystem] = (),
        services: Sequence[ServedService] = (),
        keep_billing_header: bool = False,
    ):
        self.models, self.limits = models, limits
        self.models_api = ModelEndpoints(models, limits, self.choose)
        self.vision, self._others = VisionEndpoints(systems, services, limits), [*systems, *services]
        collectors = (
            MemoryFamilies(),
            ResidencyFamilies(models),
            SystemFamilies(systems),
            ServiceFamilies(services),
        )
        self.metrics, self.stored = Metrics(models, collectors), ResponseStore()
        self._chat_of = functools.partial(chat_of, keep_billing_header=keep_billing_header)

    async def choose(self, request: Request, name: str) -> ModelChoice:
        """Find the model that a request asks for, and load it if need be; the response is counted as this model's.

        Raises BadRequestError if there is none; NotLoadedError if it is not loaded in time, or cannot be.
        """
        choice = self.models.find(name)
        model = choice.model
        request.state.model = model.name
        model.use.note()
        if model.loaded is None and model.on_demand:
            await until_disconnect(request.receive, self.models.load(model, self.limits.timeout))
        model.check_failure()
        model.llm  # noqa: B018 (raises unless it is loaded)
        return choice

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = decode(await self.limits.read_body(request), CompletionBody)
        model, name, adapter = await self.choose(request, body.model)
        return await self._respond(request, completion_reply(model.llm, body, name, adapter, self.limits))

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = decode(await self.limits.read_body(request), ChatBody)
        model, name, adapter = await self.choose(request, body.model)
        return await self._respond(request, await chat_reply(model, body, name, adapter, self.limits))

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        body = decode(await self.limits.read_body(request), ResponseBody)
        model, name, adapter = await self.choose(request, body.model)
        reply = await response_reply(model, body, name, adapter, self.limits, self.stored)
        return await self._respond(request, reply)

    async def stored_response(self, request: Request) -> Response:
        """`GET` and `DELETE /v1/responses/ID`."""
        id = request.path_params["response_id"]
        if request.method == "DELETE":
            self.stored.delete(id)
            return json_response({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream") == "true":
            raise BadRequestError("stream is not implemented for a stored response.", param="stream")
        return Response(self.stored.response(id), media_type="application/json")

    async def messages(self, request: Request) -> Response:
        """`POST /v1/messages`."""
        body = decode(await self.limits.read_body(request), MessagesBody)
        model, name, adapter = await self.choose(request, body.model)
        answer = await begin_chat(model, self._chat_of(body), adapter, self.limits)
        return await self._respond(request, MessageReply(body, name, answer, request_id(request.scope)))

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""
        body = decode(await self.limits.read_body(request), CountTokensBody)
        model, name, _ = await self.choose(request, body.model)
        prompt = await until_disconnect(request.receive, encode_chat(model, self._chat_of(body)))
        note(request.scope, name, len(prompt.token_ids))
        return json_response({"input_tokens": len(prompt.token_ids)})

    async def _respond(self, request: Request, reply: AnyReply) -> Response:
        def count() -> None:
            for snapshot in reply.newest.values():
                self.metrics.ended(request.state.model, snapshot.output())
            assert reply.usage is not None
            note(request.scope, reply.model, reply.usage.prompt_tokens, reply.usage.completion_tokens)

        note(request.scope, reply.model)
        return await respond(request, reply, count)

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        body = decode(await self.limits.read_body(request), EmbeddingBody)
        model, name, adapter = await self.choose(request, body.model)
        work = embeddings(model.llm, body, name, adapter, self.limits)
        answer = await until_disconnect(request.receive, work)
        note(request.scope, answer["model"], answer["usage"]["prompt_tokens"])
        return json_response(answer)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = decode(await self.limits.read_body(request), TokenizeBody)
        return json_response(await tokenize((await self.choose(request, body.model)).model.llm, body))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = decode(await self.limits.read_body(request), DetokenizeBody)
        return json_response(await detokenize((await self.choose(request, body.model)).model.llm, body))

    async def health(self, request: Request) -> Response:
        """`GET /health`: whether the process lives."""
        return Response(status_code=200 if self._are_running else 503)

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: whether requests to every model are taken."""
        are_ready = self.models.are_ready and all(each.is_loaded for each in self._others)
        return Response(status_code=200 if are_ready and self._are_running else 503)

    @property
    def _are_running(self) -> bool:
        """Whether all take requests, or will once they are loaded."""
        return self.models.are_running and all(each.is_running for each in self._others)

    def close(self, *, drain: bool) -> None:
        """Close all models, systems and services, with `drain` once their requests have ended."""
        for each in (self.models, *self._others):
            each.close(drain=drain)

    async def show_metrics(self, request: Request) -> Response:
        """`GET /metrics`, in Prometheus' format."""
        content, kind = self.metrics.expose()
        return Response(content, headers={"Content-Type": kind})

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return json_response(document(request.app.routes))

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_response({"version": version("jaxinfer")})

    def guarded(self, path: str, handler: Handler, *methods: str, admin: bool = False) -> Route:
        """A route behind the check of keys. Errors are responses, and responses are counted.

        admin: whether it changes the server, and needs an admin key.
        """

        async def handle(request: Request) -> Response:
            try:
                self.limits.check_key(request, admin=admin)
                response = await handler(request)
            except (DisconnectedError, ClientDisconnect):
                response = Response(status_code=499)
            except Exception as error:
                response = error_response(error, request.scope, CONTENT.get(path))
            if path in PATHS and (id := request_id(request.scope)):
                response.headers["Request-Id"] = id  # the name that Anthropic's clients look for
            only = self.models.only and self.models.only.name
            self.metrics.responded(getattr(request.state, "model", only or ""), path, response.status_code)
            return response

        return Route(path, handle, methods=list(methods or ("GET",)))


def make_app(
    models: ServedModels,
    limits: Limits,
    sinks: Iterable[Sink] = (),
    *,
    systems: Sequence[ServedSystem] = (),
    services: Sequence[ServedService] = (),
    keep_billing_header: bool = False,
) -> Starlette:
    """Make the application of models, some of which may be loaded later; see `jaxinfer.http.app`.

    Args:
      systems: systems of experts.
      services: elastic services.
      keep_billing_header: as in `ServerConfig`.
    """
    server = Server(models, limits, systems=systems, services=services, keep_billing_header=keep_billing_header)
    drain = Drain(lambda: asyncio.to_thread(server.close, drain=False))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.close, drain=True)
        server.vision.close()

    routes = [
        server.guarded("/v1/completions", server.completions, "POST"),
        server.guarded("/v1/chat/completions", server.chat, "POST"),
        server.guarded("/v1/responses", server.responses, "POST"),
        Route("/v1/responses/compact", _absent, methods=["POST"], include_in_schema=False),
        server.guarded("/v1/responses/{response_id}", server.stored_response, "GET", "DELETE"),
        server.guarded("/v1/messages", server.messages, "POST"),
        server.guarded("/v1/messages/count_tokens", server.count_tokens, "POST"),
        server.guarded("/v1/embeddings", server.embeddings, "POST"),
        *server.models_api.routes(server.guarded),
        *server.vision.routes(server.guarded),
        server.guarded("/tokenize", server.tokenize, "POST"),
        server.guarded("/detokenize", server.detokenize, "POST"),
        Route("/metrics", server.show_metrics),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/version", server.version),
        Route("/openapi.json", server.openapi),
        *page_routes(),
    ]
    middleware = [Middleware(Records, sinks), *_cors(limits), Middleware(drain.middleware)]
    app = Starlette(
        routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers={404: _unknown, 405: _unknown}
    )
    app.state.drain = drain
    return app


def _cors(limits: Limits) -> list[Middleware]:
    """Let pages of other origins ask; their preflights need no key."""
    if not limits.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=limits.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    ]


async def _absent(request: Request) -> Response:
    """Say that there is no such endpoint; the path is no id of another one."""
    raise HTTPException(404)


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path}"
    return error_response(
        BadRequestError(f"there is no endpoint {what}.", status=status, code="not_found"), request.scope
    )
