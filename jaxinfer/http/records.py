"""A record of each request: its id, which clients may choose, and a line of the access log."""

import dataclasses
import datetime
import re
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RECORD = "jaxinfer.record"
"""The key of a request's record in its scope."""
SEND = "jaxinfer.send"
"""The key of the sender of a response's parts between its start and its end, at which no middleware needs to look."""

_ID = re.compile(rb"[!-~]{1,128}")  # it goes into headers and logs


@dataclasses.dataclass
class Record:
    """The data of a request.

    Attributes:
      id: the client's `X-Request-Id`, or a new one.
      client: the client's address.
      method: the HTTP method.
      path: the path.
      headers: the request's headers, their names in lower case.
      began: when it began, in seconds since 1970.
      status: the status of the response; 499: the client left before it.
      seconds: how long it took.
      complete: whether all of the response was sent.
      model: the model's name; None unless it is known.
      prompt_tokens: tokens of its prompts; None unless they are known.
      completion_tokens: tokens of its completions; None unless they are known.
      inputs: images or texts for experts or an elastic service; None for other requests.
    """

    id: str
    client: str
    method: str
    path: str
    headers: dict[bytes, bytes]
    began: float
    status: int = 499
    seconds: float = 0.0
    complete: bool = False
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    inputs: int | None = None


Sink = Callable[[Record], None]
"""Takes the record of a request that has ended."""


def note(
    scope: Scope,
    model: str,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    inputs: int | None = None,
) -> None:
    """Add to a request's record."""
    if (record := scope.get(RECORD)) is not None:
        record.model, record.prompt_tokens, record.completion_tokens = model, prompt_tokens, completion_tokens
        record.inputs = inputs


def request_id(scope: Scope) -> str | None:
    """The id of a request; None without its record."""
    record = scope.get(RECORD)
    return record and record.id


class Records:
    """Middleware that keeps a record of each request, and tells its id in the response's `X-Request-Id`.

    Args:
      app: the application.
      sinks: where records go.
    """

    def __init__(self, app: ASGIApp, sinks: Iterable[Sink] = ()):
        self._app, self._sinks = app, tuple(sinks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD] = _begin(scope)
        scope[SEND] = send
        began = time.perf_counter()

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                record.complete = True

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            record.seconds = time.perf_counter() - began
            for sink in self._sinks:
                sink(record)


def _begin(scope: Scope) -> Record:
    headers = dict(scope["headers"])
    given = headers.get(b"x-request-id", b"")
    return Record(
        id=given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex,
        client=(scope.get("client") or ("",))[0],
        method=scope["method"],
        path=scope["path"],
        headers=headers,
        began=time.time(),
    )


def access_log(file: TextIO) -> Sink:
    """Return a sink that writes a line of JSON to a file for each request."""

    def write(record: Record) -> None:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.began, datetime.UTC).isoformat(timespec="milliseconds"),
            "request_id": record.id,
            "client": record.client,
            "method": record.method,
            "path": record.path,
            "status": record.status,
            "seconds": round(record.seconds, 6),
            "complete": record.complete,
        }
        for name in ("model", "prompt_tokens", "completion_tokens", "inputs"):
            if (value := getattr(record, name)) is not None:
                line[name] = value
        file.write(msgspec.json.encode(line).decode() + "\n")
        file.flush()

    return write
