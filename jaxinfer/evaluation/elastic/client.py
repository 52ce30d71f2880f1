"""A client of an elastic service on a server."""

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence

import httpx2
import msgspec

from jaxinfer.elastic.scheduling.query import Outcome, Query
from jaxinfer.elastic.tasks.datasets import Dataset
from jaxinfer.evaluation.elastic.simulator import ServedQuery, shed_query
from jaxinfer.evaluation.image_requests import checked, encoded, headers_of


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
