"""The application: its endpoints, and what every request passes."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.fields import shown
from jaxinfer.http.adapters import LoadAdapterBody, UnloadAdapterBody, load_adapter, unload_adapter
from jaxinfer.http.bodies import ChatBody, CompletionBody, decode
from jaxinfer.http.chats import begin_chat, encode_chat
from jaxinfer.http.connection import DisconnectedError, until_disconnect
from jaxinfer.http.draining import Drain
from jaxinfer.http.embeddings import EmbeddingBody, embeddings
from jaxinfer.http.error_responses import error_response
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.generation import AnyReply, chat_reply, completion_reply, respond
from jaxinfer.http.limits import Limits
from jaxinfer.http.messages.bodies import CountTokensBody, MessagesBody
from jaxinfer.http.messages.conversation import chat_of
from jaxinfer.http.messages.errors import PATHS
from jaxinfer.http.messages.reply import MessageReply
from jaxinfer.http.metrics import Metrics
from jaxinfer.http.openapi import document
from jaxinfer.http.page_routes import page_routes
from jaxinfer.http.records import Records, Sink, note, request_id
from jaxinfer.http.residency import Residency
from jaxinfer.http.responses.bodies import ResponseBody
from jaxinfer.http.responses.reply import response_reply
from jaxinfer.http.responses.store import ResponseStore
from jaxinfer.http.served_models import ModelChoice, ServedModel, ServedModels
from jaxinfer.http.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize

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
      keep_billing_header: as in `ServerConfig`.
    """

    def __init__(self, models: ServedModels, limits: Limits, *, keep_billing_header: bool = False):
        self.models, self.limits, self.started = models, limits, int(time.time())
        self.metrics, self.stored = Metrics(models), ResponseStore()
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
            return _json({"id": id, "object": "response", "deleted": True})
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
        return _json({"input_tokens": len(prompt.token_ids)})

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
        return _json(answer)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = decode(await self.limits.read_body(request), TokenizeBody)
        return _json(await tokenize((await self.choose(request, body.model)).model.llm, body))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = decode(await self.limits.read_body(request), DetokenizeBody)
        return _json(await detokenize((await self.choose(request, body.model)).model.llm, body))

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return _json({"object": "list", "data": [self._describe(name) for name in self.models.names]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        name = request.path_params["model"]
        request.state.model = self.models.find(name).model.name
        return _json(self._describe(name))

    async def running(self, request: Request) -> Response:
        """`GET /running`: the models that have memory, and how much."""
        return _json({"running": [_residence(model) for model in self.models.distinct if model.loaded is not None]})

    async def sleep(self, request: Request) -> Response:
        """`POST /sleep?model=NAME&level=1`."""
        model, level = self._asked(request), request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise BadRequestError(f"level must be 1 or 2, got {shown(level)}.", param="level")
        await self.models.change(functools.partial(_sleep, model, int(level)))
        return _json(_residence(model))

    async def wake_up(self, request: Request) -> Response:
        """`POST /wake_up?model=NAME`: also loads a model that is not loaded."""
        model = self._asked(request)
        await self.models.change(functools.partial(_wake_up, self.models.residency, model))
        return _json(_residence(model))

    async def unload(self, request: Request) -> Response:
        """`POST /unload?model=NAME`."""
        model = self._asked(request)
        await self.models.change(model.unload)
        return _json({"model": model.name, "state": model.state.value})

    def _asked(self, request: Request) -> ServedModel:
        """The model in a query. Raises BadRequestError."""
        model = self.models.find(request.query_params.get("model", "")).model
        request.state.model = model.name
        return model

    async def load_adapter(self, request: Request) -> Response:
        """`POST /v1/load_lora_adapter`."""
        body = decode(await self.limits.read_body(request), LoadAdapterBody)
        model = (await self.choose(request, body.model)).model
        await load_adapter(self.models, model, body)
        return _json(self._describe(body.lora_name))

    async def unload_adapter(self, request: Request) -> Response:
        """`POST /v1/unload_lora_adapter`."""
        body = decode(await self.limits.read_body(request), UnloadAdapterBody)
        unload_adapter(self.models.find(body.model).model, body)
        return _json({"id": body.lora_name, "object": "model", "deleted": True})

    def _describe(self, name: str) -> dict[str, object]:
        """Describe a model or one of its adapters. Raises BadRequestError if there is none."""
        model, name, adapter = self.models.find(name)
        described: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "jaxinfer",
            "state": model.state.value,
        }
        if (llm := model.loaded) is not None:
            described["max_model_len"] = llm.engine.config.context
        return described if adapter is None else {**described, "parent": model.name}

    async def health(self, request: Request) -> Response:
        """`GET /health`: whether the process lives."""
        return Response(status_code=200 if self.models.are_running else 503)

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: whether requests to every model are taken."""
        return Response(status_code=200 if self.models.are_ready and self.models.are_running else 503)

    async def show_metrics(self, request: Request) -> Response:
        """`GET /metrics`, in Prometheus' format."""
        content, kind = self.metrics.expose()
        return Response(content, headers={"Content-Type": kind})

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return _json(document(request.app.routes))

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return _json({"version": version("jaxinfer")})

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
    models: ServedModels, limits: Limits, sinks: Iterable[Sink] = (), *, keep_billing_header: bool = False
) -> Starlette:
    """Make the application of models, some of which may be loaded later; see `jaxinfer.http.app`.

    Args:
      keep_billing_header: as in `ServerConfig`.
    """
    server = Server(models, limits, keep_billing_header=keep_billing_header)
    drain = Drain(lambda: asyncio.to_thread(models.close, drain=False))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(functools.partial(models.close, drain=True))

    routes = [
        server.guarded("/v1/completions", server.completions, "POST"),
        server.guarded("/v1/chat/completions", server.chat, "POST"),
        server.guarded("/v1/responses", server.responses, "POST"),
        Route("/v1/responses/compact", _absent, methods=["POST"], include_in_schema=False),
        server.guarded("/v1/responses/{response_id}", server.stored_response, "GET", "DELETE"),
        server.guarded("/v1/messages", server.messages, "POST"),
        server.guarded("/v1/messages/count_tokens", server.count_tokens, "POST"),
        server.guarded("/v1/embeddings", server.embeddings, "POST"),
        server.guarded("/v1/models", server.list_models),
        server.guarded("/v1/models/{model:path}", server.model),
        server.guarded("/running", server.running),
        server.guarded("/sleep", server.sleep, "POST", admin=True),
        server.guarded("/wake_up", server.wake_up, "POST", admin=True),
        server.guarded("/unload", server.unload, "POST", admin=True),
        server.guarded("/v1/load_lora_adapter", server.load_adapter, "POST", admin=True),
        server.guarded("/v1/unload_lora_adapter", server.unload_adapter, "POST", admin=True),
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


def _residence(model: ServedModel) -> dict[str, object]:
    """Describe a model for `/running`."""
    llm = model.loaded
    return {
        "model": model.name,
        "state": model.state.value,
        "pinned": model.pinned,
        "ttl": model.ttl,
        "requests": 0 if llm is None else llm.num_requests,
        "bytes": {} if llm is None else llm.reserved,
    }


def _sleep(model: ServedModel, level: int) -> None:
    """Have a model sleep until `_wake_up`. Raises BadRequestError for one that is not loaded, or cannot."""
    if (llm := model.loaded) is None or not llm.can_sleep:
        why = "it is not loaded" if llm is None else "its weights are streamed"
        raise BadRequestError(f"the model {model.name!r} cannot sleep: {why}.", param="model", status=409)
    model.held = True
    llm.sleep(level=level)


def _wake_up(residency: Residency, model: ServedModel) -> None:
    """Load or wake a model, for which others make room."""
    model.held = False
    model.load(asleep=True)
    residency.watch(model)
    residency.wake_up(model)


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


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
