"""The endpoints that tell of models, and that change them."""

import functools
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.fields import shown
from jaxinfer.http.adapters import LoadAdapterBody, UnloadAdapterBody, load_adapter, unload_adapter
from jaxinfer.http.bodies import decode
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.json_response import json_response
from jaxinfer.http.limits import Limits
from jaxinfer.http.residency import Residency
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.served_models import ModelChoice, ServedModels


class ModelEndpoints:
    """The endpoints that tell of models, and that change them.

    Args:
      models: the models.
      limits: limits of clients.
      choose: finds the model that a request names, and loads it.
    """

    def __init__(self, models: ServedModels, limits: Limits, choose: Callable[[Request, str], Awaitable[ModelChoice]]):
        self._models, self._limits, self._choose, self._started = models, limits, choose, int(time.time())

    def routes(self, guarded: Callable[..., Route]) -> list[Route]:
        """Make the routes. guarded: makes a route behind the check of keys, as `Server.guarded`."""
        return [
            guarded("/v1/models", self.list_models),
            guarded("/v1/models/{model:path}", self.model),
            guarded("/running", self.running),
            guarded("/sleep", self.sleep, "POST", admin=True),
            guarded("/wake_up", self.wake_up, "POST", admin=True),
            guarded("/unload", self.unload, "POST", admin=True),
            guarded("/v1/load_lora_adapter", self.load_adapter, "POST", admin=True),
            guarded("/v1/unload_lora_adapter", self.unload_adapter, "POST", admin=True),
        ]

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_response({"object": "list", "data": [self._describe(name) for name in self._models.names]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        name = request.path_params["model"]
        request.state.model = self._models.find(name).model.name
        return json_response(self._describe(name))

    async def running(self, request: Request) -> Response:
        """`GET /running`: the models that have memory, and how much."""
        loaded = [model for model in self._models.distinct if model.loaded is not None]
        return json_response({"running": [_residence(model) for model in loaded]})

    async def sleep(self, request: Request) -> Response:
        """`POST /sleep?model=NAME&level=1`."""
        model, level = self._asked(request), request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise BadRequestError(f"level must be 0, 1 or 2, got {shown(level)}.", param="level")
        await self._models.change(functools.partial(_sleep, model, int(level)))
        return json_response(_residence(model))

    async def wake_up(self, request: Request) -> Response:
        """`POST /wake_up?model=NAME`: also loads a model that is not loaded."""
        model = self._asked(request)
        await self._models.change(functools.partial(_wake_up, self._models.residency, model))
        return json_response(_residence(model))

    async def unload(self, request: Request) -> Response:
        """`POST /unload?model=NAME`."""
        model = self._asked(request)
        await self._models.change(model.unload)
        return json_response({"model": model.name, "state": model.state.value})

    def _asked(self, request: Request) -> ServedModel:
        """The model in a query. Raises BadRequestError."""
        model = self._models.find(request.query_params.get("model", "")).model
        request.state.model = model.name
        return model

    async def load_adapter(self, request: Request) -> Response:
        """`POST /v1/load_lora_adapter`."""
        body = decode(await self._limits.read_body(request), LoadAdapterBody)
        model = (await self._choose(request, body.model)).model
        await load_adapter(self._models, model, body)
        return json_response(self._describe(body.lora_name))

    async def unload_adapter(self, request: Request) -> Response:
        """`POST /v1/unload_lora_adapter`."""
        body = decode(await self._limits.read_body(request), UnloadAdapterBody)
        unload_adapter(self._models.find(body.model).model, body)
        return json_response({"id": body.lora_name, "object": "model", "deleted": True})

    def _describe(self, name: str) -> dict[str, object]:
        """Describe a model or one of its adapters. Raises BadRequestError if there is none."""
        model, name, adapter = self._models.find(name)
        described: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "jaxinfer",
            "state": model.state.value,
        }
        if (llm := model.loaded) is not None:
            described["max_model_len"] = llm.engine.config.context
        return described if adapter is None else {**described, "parent": model.name}


def _residence(model: ServedModel) -> dict[str, object]:
    """Describe a model for `/running`."""
    llm = model.loaded
    return {
        "model": model.name,
        "state": model.state.value,
        "pinned": model.pinned,
        "ttl": model.ttl,
        "requests": 0 if llm is None else llm.num_requests,
        "bytes": {} if llm is None else {budget.name: size for budget, size in llm.reserved.items()},
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
