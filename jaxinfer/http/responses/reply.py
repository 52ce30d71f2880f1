"""The way of a request of `/v1/responses` to its answer, whole or as a stream of events."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from jaxinfer.generation.engine.view import CompletionSnapshot, RequestSnapshot
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.http.answers import Usage, usage_of
from jaxinfer.http.chats import Chat, ChatAnswer, begin_chat
from jaxinfer.http.connection import EventStream
from jaxinfer.http.errors import describe
from jaxinfer.http.limits import Limits
from jaxinfer.http.responses.bodies import ENCRYPTED_REASONING, InputItem, ResponseBody
from jaxinfer.http.responses.conversation import to_messages
from jaxinfer.http.responses.output import EventWriter, ResponseOutput, new_id
from jaxinfer.http.responses.store import ResponseStore
from jaxinfer.http.served_model import ServedModel
from jaxinfer.text.parsing import TextPart

FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""The codes of failed responses, by the status that the error would have; others are `server_error`."""


class ResponseReply:
    """The way of one request from its stream to the client.

    Args:
      body: the request.
      model: the model's name, as the client gave it.
      answer: the answer.
      conversation: the items that the model was asked with.
      store: takes the response once it has ended.

    Attributes:
      newest: the newest snapshot, by the place 0.
      usage: the tokens of the request; None before its end.
    """

    def __init__(
        self, body: ResponseBody, model: str, answer: ChatAnswer, conversation: list[InputItem], store: ResponseStore
    ):
        self.body, self.model, self._answer = body, model, answer
        self._conversation, self._store = conversation, store
        self.newest = dict[int, RequestSnapshot]()
        self.usage: Usage | None = None
        self._seen: CompletionSnapshot | None = None
        self._parts, self._events = answer.parts(), EventWriter()
        self._output = ResponseOutput(self._events, answer.new_call_id, encrypted=ENCRYPTED_REASONING in body.include)
        self._response = _empty_response(body, model)

    @property
    def stream(self) -> bool:
        """Whether the client wants a stream."""
        return self.body.stream

    async def whole(self) -> bytes:
        """Wait for the answer; return the response as JSON."""
        self._advance(await self._answer.stream.last())
        return await self._end()

    def events(self, ended: Callable[[], None]) -> EventStream[Any]:
        """The events of a stream. ended: called before the last ones are sent."""

        def event(snapshot: RequestSnapshot) -> bytes:
            self._advance(snapshot)
            return self._events.take()

        async def last() -> bytes:
            await self._end()
            ended()
            return self._events.take()

        return EventStream(self._answer.stream.snapshots, event, last, self._failure)

    def _advance(self, snapshot: RequestSnapshot) -> None:
        """Take the new parts of a snapshot."""
        if not self.newest:
            sampling = snapshot.request.sampling
            for field in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
                self._response[field] = getattr(sampling, field)
            self._tell("created")
            self._tell("in_progress")
        self.newest[0], completion = snapshot, snapshot.completions[0]
        for part in self._parts.advance(completion, self._seen):
            self._output.add(part)
        self._seen = completion

    async def _end(self) -> bytes:
        """End the response: tell of it, and store it. Returns its JSON."""
        snapshot, output = self.newest[0], self._output
        status = "completed"
        if snapshot.completions[0].finish_reason is FinishReason.LENGTH:
            status = "incomplete"
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        if not output.items:  # a response without items is none to many clients
            output.add(TextPart("content", ""))
        output.close(status)
        self.usage = usage_of([snapshot], await self._answer.end(snapshot, [self._parts]))
        self._response |= {"status": status, "output": output.items, "usage": _usage(self.usage)}
        self._tell(status)
        content = msgspec.json.encode(self._response)
        if self.body.store:
            conversation = [*self._conversation, *msgspec.convert(output.items, list[InputItem])]
            self._store.put(self._response["id"], content, conversation, [item["id"] for item in output.items])
        return content

    def _failure(self, error: Exception) -> bytes:
        """The last event of a stream that ends with an error."""
        status, body, _ = describe(error, "input")
        self._output.close("incomplete")
        failure = {"code": FAILURES.get(status, "server_error"), "message": body.message}
        self._response |= {"status": "failed", "output": self._output.items, "error": failure}
        self._tell("failed")
        return self._events.take()

    def _tell(self, what: str) -> None:
        """Write an event with the response as it is."""
        self._events.write(f"response.{what}", response=self._response)


def _empty_response(body: ResponseBody, model: str) -> dict[str, Any]:
    """A response at its beginning. It has all fields of OpenAI's schema, since some clients refuse one without."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "conversation": None,
        "prompt": None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": body.effort, "summary": body.reasoning and body.reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "text": _text(body),
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "tools": msgspec.to_builtins(body.tools),
        "top_logprobs": 0,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _text(body: ResponseBody) -> dict[str, Any]:
    """The options of the text, as a response has them."""
    form, verbosity = body.text and body.text.format, body.text and body.text.verbosity
    fields: dict[str, Any] = {"type": "text" if form is None else form.type}
    if form is not None and form.type == "json_schema":
        fields |= {"name": form.name, "schema": form.schema, "description": form.description, "strict": True}
    return {"format": fields, "verbosity": verbosity or "medium"}


def _usage(usage: Usage) -> dict[str, Any]:
    """The tokens of a request, by the names of this API."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


async def response_reply(
    model: ServedModel, body: ResponseBody, name: str, adapter: str | None, limits: Limits, store: ResponseStore
) -> ResponseReply:
    """Begin a response. Raises BadRequestError, ValueError; OverloadedError."""
    body.check()
    before = [] if body.previous_response_id is None else store.conversation(body.previous_response_id)
    asked = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    new = [store.item(item.id) if item.kind == "item_reference" else item for item in asked]
    conversation = [*before, *new]
    chat = Chat(
        messages=to_messages(conversation, instructions=body.instructions, num_stored=len(before)),
        tools=body.checked_tools(),
        sampling=body.params(),
        template={},
        reasoning_effort=body.effort,
    )
    return ResponseReply(body, name, await begin_chat(model, chat, adapter, limits), conversation, store)
