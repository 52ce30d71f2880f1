"""A client of the endpoints of experts and elastic tasks."""

import asyncio
import base64
import io
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import httpx2
import msgspec
import numpy as np

from jaxinfer.elastic.scheduling.query import Outcome, Query
from jaxinfer.elastic.tasks.datasets import Dataset
from jaxinfer.evaluation.elastic.simulator import ServedQuery, shed_query
from jaxinfer.experts.execution.kinds import Judgement
from jaxinfer.experts.results import Result, Stage
from jaxinfer.extras import require_extra
from jaxinfer.serving.errors import FailedError

IN_FLIGHT = 16
"""Inputs of one `ExpertsClient.run` that are sent at a time."""


class ExpertsClient:
    """Sends inputs to a system of experts on a server.

    Args:
      url: the server, without a path.
      model: the system's name there; empty: the only one.
      api_key: the server's key; None: it needs none.
    """

    def __init__(self, url: str, *, model: str = "", api_key: str | None = None):
        self._url, self._model = url, model
        self._http = httpx2.Client(base_url=url, headers=headers_of(api_key), timeout=600.0, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def kinds(self) -> list[str]:
        """The kinds of the system's inputs. Raises ValueError if the server does not tell them."""
        listed = list_at(self._http, self._url, "/v1/experts")
        inputs = [each["inputs"] for each in listed if self._model in ("", each["id"])]
        if len(inputs) != 1:
            names = ", ".join(each["id"] for each in listed) or "none"
            raise ValueError(f"{self._url}: name one of its systems of experts with --name; systems: {names}.")
        return inputs[0]

    def run(self, inputs: Iterable[tuple[str, bytes]]) -> Iterator[Result | Exception]:
        """Yield the results or errors of (kind, image file) pairs, in their order."""
        under_way = deque[Future[Result]]()

        def taken() -> Result | Exception:
            try:
                return under_way.popleft().result()
            except Exception as error:
                return error

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            for kind, content in inputs:
                under_way.append(threads.submit(self._infer, kind, content))
                while len(under_way) >= IN_FLIGHT:
                    yield taken()
            while under_way:
                yield taken()

    def _infer(self, kind: str, content: bytes) -> Result:
        given = {"kind": kind, "image": base64.b64encode(content).decode()}
        answer = self._http.post("/v1/experts/infer", json={"model": self._model, "inputs": [given]})
        result = checked(answer)["results"][0]
        stages = tuple(
            Stage(
                expert=stage["expert"],
                judgement=Judgement(verdict=stage["verdict"]),
                executor=stage["executor"],
                batch=stage["batch"],
                waited=stage["queue_seconds"],
                seconds=stage["compute_seconds"],
            )
            for stage in result["stages"]
        )
        return Result(stages=stages, latency=result["seconds"])


def headers_of(api_key: str | None) -> dict[str, str]:
    """The headers of requests with a key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def list_at(http: httpx2.Client, url: str, path: str) -> list[dict[str, Any]]:
    """Ask a server for a list. Raises ValueError if it cannot be asked."""
    try:
        return checked(http.get(path))["data"]
    except (httpx2.HTTPError, FailedError, KeyError) as error:
        raise ValueError(f"{url}{path}: {error}") from error


def checked(answer: httpx2.Response) -> dict[str, Any]:
    """The JSON of an answer. Raises FailedError for one that is an error."""
    try:
        body = answer.json()
        if answer.status_code != 200:
            raise FailedError(f"HTTP {answer.status_code}: {body['error']['message']}")
    except (ValueError, KeyError, TypeError) as error:
        raise FailedError(f"HTTP {answer.status_code}: {answer.text[:200]}") from error
    return body


class QueryClient:
    """Sends queries to an elastic service on a server, each when it is due.

    Args:
      url: the server, without a path.
      model: the service's name there.
      api_key: the server's key; None: it needs none.
    """

    def __init__(self, url: str, *, model: str, api_key: str | None = None):
        self._url, self._model, self._headers = url, model, headers_of(api_key)

    async def send(
        self, queries: Sequence[Query], tests: Mapping[str, Dataset], ended: Callable[[], None]
    ) -> list[ServedQuery]:
        """Send queries, and return how each ended; refused ones count as shed.

        Args:
          queries: queries with arrivals in seconds from now; payloads are indices of images.
          tests: each task's images with labels.
          ended: called after each.

        Raises FailedError for a query that the server refuses for another reason.
        """
        given = sorted(queries, key=lambda query: (query.arrival, query.id))
        bodies = [self._body(query, tests[query.task]) for query in given]
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx2.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=600.0, limits=limits, trust_env=False
        ) as http:
            begun = time.perf_counter()

            async def ask(query: Query, body: bytes) -> ServedQuery:
                await asyncio.sleep(query.arrival - (time.perf_counter() - begun))
                answer = await http.post("/v1/elastic/query", content=body)
                ended()
                return _served(query, answer, tests[query.task])

            return list(await asyncio.gather(*map(ask, given, bodies)))

    def _body(self, query: Query, test: Dataset) -> bytes:
        image = base64.b64encode(encoded(test.images[query.payload])).decode()
        fields = {"model": self._model, "task": query.task, "images": [image]}
        return msgspec.json.encode(fields | {"latency": query.latency, "utility": query.utility})


def _served(query: Query, answer: httpx2.Response, test: Dataset) -> ServedQuery:
    if answer.status_code in (408, 429):
        return shed_query(query, query.arrival)
    result = checked(answer)["results"][0]
    is_right = result["label"] == test.names[test.labels[query.payload]]
    outcome = (Outcome.CORRECT if is_right else Outcome.WRONG) if result["in_time"] else Outcome.LATE
    began = query.arrival + result["queue_seconds"]
    ended = began + result["compute_seconds"]
    return ServedQuery(query=query, outcome=outcome, level=result["level"], batch=None, began=began, ended=ended)


def encoded(pixels: np.ndarray) -> bytes:
    """Encode an image, uint8 [H, W, 3], as a PNG. Raises MissingExtraError without Pillow."""
    require_extra("PIL", "sending images")
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()
