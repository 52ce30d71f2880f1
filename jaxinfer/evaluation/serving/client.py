"""A client of `POST /v1/completions` that keeps the time of every event of a stream."""

import dataclasses
import time
from collections import Counter
from typing import Any

import httpx2
import msgspec

ERROR_CHARACTERS = 200
"""Characters of a server's error that are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A request of a load.

    Attributes:
      prompt: the prompt's text.
      output_tokens: tokens to generate; end-of-text is ignored, if the server knows vLLM's field for it.
      arrival: when it is to be sent, in seconds from the start.
    """

    prompt: str
    output_tokens: int
    arrival: float = 0.0


@dataclasses.dataclass(kw_only=True)
class RequestRecord:
    """The course of a request. Times are seconds from the start of the load.

    Attributes:
      arrival: when it was to be sent; all latencies count from here.
      sent: when it was sent.
      events: when each event with text came.
      prompt_tokens: the prompt's tokens, as the server counts them; 0 if it does not.
      output_tokens: tokens of the output, as the server counts them; without a count, events with text.
      error: the kind of error; "" for a request that came to its end.
      message: the error.
      ended: when its stream, or its error, ended.
    """

    arrival: float
    sent: float = 0.0
    events: list[float] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    message: str = ""
    ended: float = 0.0


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _FailedStreamError(Exception):
    """A stream that ended with an error, or before its end. kind: as in `RequestRecord.error`."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class CompletionClient:
    """Sends requests to one server, each over a connection of its own while it runs.

    Args:
      url: the server, without a path.
      model: the model's name there.
      api_key: the server's key; None: it needs none.
      timeout: seconds until a request is given up.
    """

    def __init__(self, url: str, *, model: str = "", api_key: str | None = None, timeout: float = 600.0):
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self.model, self._url, self._decoder = model, url, msgspec.json.Decoder(_Chunk)

    async def __aenter__(self) -> "CompletionClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def find_model(self) -> str:
        """Ask the server for the name of its first model. Raises ValueError if it cannot be asked."""
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            return answer.json()["data"][0]["id"]
        except (httpx2.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{self._url}/v1/models does not name a model: {error}") from error

    async def complete(self, request: LoadRequest, start: float) -> RequestRecord:
        """Run a request; its error is in the record. start: of the load, on `time.perf_counter`'s clock."""
        record = RequestRecord(arrival=request.arrival, sent=time.perf_counter() - start)
        try:
            await self._read(request, record, start)
        except _FailedStreamError as error:
            record.error, record.message = error.kind, str(error)
        except httpx2.TimeoutException as error:
            record.error, record.message = "timeout", repr(error)
        except httpx2.HTTPError as error:
            record.error, record.message = type(error).__name__, str(error)
        except msgspec.MsgspecError as error:
            record.error, record.message = "bad event", str(error)
        record.ended = time.perf_counter() - start
        return record

    async def _read(self, request: LoadRequest, record: RequestRecord, start: float) -> None:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                message = (await response.aread()).decode(errors="replace")
                raise _FailedStreamError(f"HTTP {response.status_code}", message[:ERROR_CHARACTERS])
            finished, rest = False, b""
            async for content in response.aiter_bytes():
                *lines, rest = (rest + content).split(b"\n")
                now = time.perf_counter() - start
                for line in lines:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        finished |= self._take(line[5:], record, now)
        if not finished:
            raise _FailedStreamError("cut short", "The stream ended without a finish_reason.")

    def _take(self, content: bytes, record: RequestRecord, now: float) -> bool:
        """Add an event to a record; return whether the completion has finished."""
        chunk = self._decoder.decode(content)
        if chunk.error is not None:
            raise _FailedStreamError("error in stream", str(chunk.error)[:ERROR_CHARACTERS])
        if any(choice.text for choice in chunk.choices):
            record.events.append(now)
            record.output_tokens += 1
        if chunk.usage is not None:
            record.prompt_tokens, record.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        return any(choice.finish_reason for choice in chunk.choices)


def count_errors(records: list[RequestRecord]) -> dict[str, int]:
    """Count the errors of each kind, the most frequent first."""
    return dict(Counter(record.error for record in records if record.error).most_common())
