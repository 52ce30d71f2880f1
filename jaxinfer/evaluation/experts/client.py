"""A client of a system of experts on a server."""

import base64
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import httpx2

from jaxinfer.evaluation.image_requests import checked, headers_of, list_at
from jaxinfer.experts.results import Judgement, Result, Stage

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
