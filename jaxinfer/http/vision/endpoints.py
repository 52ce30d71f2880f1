"""The endpoints of experts and elastic services."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.http.bodies import decode
from jaxinfer.http.connection import until_disconnect
from jaxinfer.http.json_response import json_response
from jaxinfer.http.limits import Limits
from jaxinfer.http.records import note
from jaxinfer.http.vision.elastic import RegisterBody, describe_task, query, read_query, register
from jaxinfer.http.vision.experts import describe_system, infer, read_infer
from jaxinfer.http.vision.images import ImageThreads
from jaxinfer.http.vision.served import ServedOnes, ServedService, ServedSystem


class VisionEndpoints:
    """The endpoints of systems of experts and elastic services.

    Args:
      systems: the systems, by the names by which clients ask for them.
      services: the services.
      limits: limits of clients.
    """

    def __init__(self, systems: Sequence[ServedSystem], services: Sequence[ServedService], limits: Limits):
        self._systems = ServedOnes(systems, "system of experts")
        self._services = ServedOnes(services, "elastic service")
        self._limits, self._threads = limits, ImageThreads()

    async def infer(self, request: Request) -> Response:
        """`POST /v1/experts/infer`."""
        return await self._answer(request, self._systems, read_infer, infer)

    async def list_experts(self, request: Request) -> Response:
        """`GET /v1/experts`."""
        return json_response({"object": "list", "data": [describe_system(served) for served in self._systems]})

    async def query(self, request: Request) -> Response:
        """`POST /v1/elastic/query`."""
        return await self._answer(request, self._services, read_query, query)

    async def _answer(
        self,
        request: Request,
        known: ServedOnes[Any],
        read: Callable[[Request, Limits], Awaitable[tuple[Any, Sequence[Any]]]],
        answer: Callable[..., Awaitable[dict[str, Any]]],
    ) -> Response:
        """Read a request, find what it is for, and answer its inputs; the response is counted as this one's."""
        request.state.model = ""  # until it is known
        options, inputs = await read(request, self._limits)
        served = known.find(options.model)
        request.state.model = served.name
        note(request.scope, served.name, inputs=len(inputs))
        work = answer(served, options, inputs, self._limits, self._threads)
        return json_response(await until_disconnect(request.receive, work))

    async def list_tasks(self, request: Request) -> Response:
        """`GET /v1/elastic/tasks`."""
        tasks = [
            describe_task(served, task)
            for served in self._services
            if served.is_loaded
            for task in served.service.tasks.values()
        ]
        return json_response({"object": "list", "data": tasks})

    async def register(self, request: Request) -> Response:
        """`POST /v1/elastic/tasks`."""
        request.state.model = ""
        body = decode(await self._limits.read_body(request), RegisterBody)
        served = self._services.find(body.model)
        request.state.model = served.name
        return json_response(await register(served, body))

    def routes(self, guarded: "Callable[..., Route]") -> list[Route]:
        """The routes; guarded: as `Server.guarded`."""
        return [
            guarded("/v1/experts/infer", self.infer, "POST"),
            guarded("/v1/experts", self.list_experts),
            guarded("/v1/elastic/query", self.query, "POST"),
            guarded("/v1/elastic/tasks", self.list_tasks),
            guarded("/v1/elastic/tasks", self.register, "POST", admin=True),
        ]

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
