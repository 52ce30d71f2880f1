"""A client that counts the events of many streams at little cost, and one that asks for the server's health."""

import asyncio
import json
import time
from typing import NamedTuple

HEALTH_SECONDS = 0.02  # between two requests
READ_SECONDS = 0.05  # between two readings of a stream
FIRST_TOKEN = 3  # the first that is no special token of the random models


OK = b"HTTP/1.1 200"


class Load(NamedTuple):
    """Requests that run at once.

    Attributes:
      streams: their number.
      prompt: tokens of each prompt, of a completion.
      tokens: tokens of each answer.
      tools: whether the requests are chats, and whether these have tools; None: they are completions.
    """

    streams: int
    prompt: int
    tokens: int
    tools: bool | None = None


def prompt_of(index: int, tokens: int) -> list[int]:
    """The prompt of a stream: no two share a prefix, and none has a special token."""
    return [FIRST_TOKEN + (index + place * 37) % 200 for place in range(tokens)]


class _Stream(asyncio.Protocol):
    """Sends one request and counts the events of its answer, without looking into them.

    It reads once in READ_SECONDS: on one machine, a client that waits for each event is woken by the server, at the
    cost of the server's CPU time.
    """

    def __init__(self, content: bytes):
        self._loop = asyncio.get_running_loop()
        self.content, self.events, self.ended = content, 0, self._loop.create_future()
        self._head = self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.content)

    def data_received(self, data: bytes) -> None:
        if len(self._head) < len(OK):
            self._head += data
            if not self._head.startswith(OK[: len(self._head)]):
                self._end(ValueError(f"The server answered {data[:500].decode(errors='replace')!r}."))
        self.transport.pause_reading()
        self._loop.call_later(READ_SECONDS, self.transport.resume_reading)
        self.events += (self._tail[-1:] + data).count(b"\n\n")
        self._tail = data[-7:] if len(data) >= 7 else (self._tail + data)[-7:]
        if self._tail == b"\r\n0\r\n\r\n":  # the last chunk of the body
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionError("The server closed the connection before the end of a stream."))

    def _end(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.transport.close()
            if error is None:
                self.ended.set_result(self.events - 1)  # without [DONE]
            else:
                self.ended.set_exception(error)


MODEL = "model"
"""The name by which the servers of `run_async.py` know theirs."""
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def _request(load: Load, index: int) -> bytes:
    if load.tools is None:
        path, asked = "completions", {"prompt": prompt_of(index, load.prompt)}
    else:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": f"Read file {index}."}]}
        asked |= {"tools": [TOOL]} if load.tools else {}
    options = {"model": MODEL, "max_tokens": load.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked | options).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


async def count_events(port: int, load: Load) -> int:
    """Run the requests of a load at once; return the events of all streams. Raises ValueError, ConnectionError."""
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda index=index: _Stream(_request(load, index)), "127.0.0.1", port)
        for index in range(load.streams)
    ]
    return sum(await asyncio.gather(*(stream.ended for _, stream in made)))


async def health_seconds(port: int, until: asyncio.Event) -> list[float]:
    """Ask for `/health` again and again, each time over a new connection; return the seconds of each answer."""
    seconds = []
    while not until.is_set():
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        seconds.append(time.perf_counter() - start)
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"/health answered {answer[:200].decode(errors='replace')!r}.")
        await asyncio.sleep(HEALTH_SECONDS)
    return seconds


async def under_load(port: int, load: Load) -> tuple[int, list[float]]:
    """Run a load, and ask for the server's health meanwhile; return the events and the seconds of each answer."""
    ended = asyncio.Event()
    asking = asyncio.create_task(health_seconds(port, ended))
    try:
        events = await count_events(port, load)
    finally:
        ended.set()
    return events, await asking
