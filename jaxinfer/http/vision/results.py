"""Work on each image or text of a request, and the results of all of them."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxinfer.http.errors import BadRequestError, describe
from jaxinfer.http.limits import Limits
from jaxinfer.serving import DeadlineExceededError


class Until:
    """The time at which a request must have begun to be answered.

    Args:
      seconds: from now.
    """

    def __init__(self, seconds: float):
        self._ends = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """The seconds that are left; below 0 once it has passed."""
        return self._ends - time.monotonic()

    def check(self) -> float:
        """The seconds that are left. Raises DeadlineExceededError if there are none."""
        if (left := self.seconds_left) <= 0:
            raise DeadlineExceededError("The deadline passed before the image was decoded.")
        return left


def check_count(name: str, given: Sequence[object], limits: Limits) -> None:
    """Raise BadRequestError unless there is at least one, and at most as many as the limits allow."""
    if not given:
        raise BadRequestError(f"{name} is empty; give at least one.", param=name)
    if len(given) > limits.max_inputs:
        raise BadRequestError(f"{name} has {len(given)}; a request may have {limits.max_inputs}.", param=name)


async def results_of[Item, Ready](
    items: Sequence[Item],
    prepare: Callable[[Item], Awaitable[Ready]],
    work: Callable[[Item, Ready], Awaitable[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Prepare all items, then do the work on all at a time; return a result of each, or its error.

    The work begins together, so that it can be done in large batches. An error does not concern the others; if there is
    no result at all, the first error is raised.
    """
    prepared = await asyncio.gather(*map(prepare, items), return_exceptions=True)

    async def finish(item: Item, ready: Ready | BaseException) -> dict[str, Any]:
        if isinstance(ready, BaseException):
            raise ready
        return await work(item, ready)

    made = await asyncio.gather(*map(finish, items, prepared), return_exceptions=True)
    errors = [each for each in made if isinstance(each, BaseException)]
    if len(errors) == len(items):
        raise errors[0]
    return [_result(each) for each in made]


def _result(made: dict[str, Any] | BaseException) -> dict[str, Any]:
    if isinstance(made, Exception):
        return {"error": describe(made)[1]}
    if isinstance(made, BaseException):
        raise made
    return made


def answer_of(kind: str, model: str, results: list[dict[str, Any]], **fields: str) -> dict[str, Any]:
    """The body of an answer; kind: its `object`."""
    id = f"{kind.partition('.')[0]}-{uuid.uuid4().hex}"
    return {"id": id, "object": kind, "model": model, **fields, "results": results}
