"""A client of an ASGI application in the same event loop: it can leave at any time, and reads as slowly as it likes."""

import asyncio
import json


class Answer:
    """A response, whose body comes in parts."""

    def __init__(self, task):
        self.status, self.headers, self.task = None, {}, task
        self.parts, self.begun = asyncio.Queue(), asyncio.Event()

    async def body(self):
        content = b""
        while (part := await self.parts.get()) is not None:
            content += part
        return content

    async def json(self):
        return json.loads(await self.body())

    async def events(self):
        """The data of server-sent events."""
        text = (await self.body()).decode()
        return [block.removeprefix("data: ") for block in text.split("\n\n") if block]


ASKED_BY_NAME = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
)
"""The endpoints whose bodies must name the model; they name "tiny" unless they name another."""


class Client:
    """Sends requests to an application."""

    def __init__(self, app):
        self._app = app

    async def ask(self, method, path, content=b"", headers=(), left=None, query=""):
        """Begin a request; returns its answer once it has a status. left: an event, at which the client leaves."""
        if not isinstance(content, bytes):
            if isinstance(content, dict) and path in ASKED_BY_NAME:
                content = {"model": "tiny", **content}
            content = json.dumps(content).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in dict(headers).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
        }
        sent = iter([{"type": "http.request", "body": content, "more_body": False}])
        left = left or asyncio.Event()

        async def receive():
            message = next(sent, None)
            if message is None:
                await left.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message):
            if left.is_set():
                raise OSError("the client has left")
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                answer.begun.set()
            else:
                answer.parts.put_nowait(message.get("body", b""))
                if not message.get("more_body"):
                    answer.parts.put_nowait(None)

        answer = Answer(None)
        answer.task = asyncio.ensure_future(self._app(scope, receive, send))
        await asyncio.wait(
            [asyncio.ensure_future(answer.begun.wait()), answer.task], return_when=asyncio.FIRST_COMPLETED
        )
        return answer

    async def post(self, path, content, **options):
        return await self.ask("POST", path, content, **options)

    async def get(self, path, **options):
        return await self.ask("GET", path, **options)
