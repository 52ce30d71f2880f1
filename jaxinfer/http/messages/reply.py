"""The answer of `/v1/messages`, whole and as a stream."""

import functools
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from jaxinfer.generation.engine.view import CompletionSnapshot, RequestSnapshot
from jaxinfer.http.answers import Usage, usage_of
from jaxinfer.http.chats import ChatAnswer
from jaxinfer.http.connection import EventStream
from jaxinfer.http.messages.bodies import MessagesBody
from jaxinfer.http.messages.errors import error_event
from jaxinfer.http.messages.events import BlockEvents, event, whole_blocks
from jaxinfer.text.parsing import Part, TextPart


class MessageReply:
    """The way of one request of `/v1/messages` from its stream to the client.

    Args:
      body: the request.
      model: the model's name, as the client gave it.
      answer: the answer.
      request_id: the request's id, for errors.

    Attributes:
      newest: the newest snapshot, at 0.
      usage: the tokens of the request; None before its end.
    """

    def __init__(self, body: MessagesBody, model: str, answer: ChatAnswer, request_id: str | None):
        self.body, self.model, self._answer, self._request_id = body, model, answer, request_id
        self.newest = dict[int, RequestSnapshot]()
        self.usage: Usage | None = None
        self._parts = answer.parts()
        self._new_call_id = functools.partial(answer.new_call_id, "toolu")
        self._events = BlockEvents(self._new_call_id)

    @property
    def stream(self) -> bool:
        """Whether the client wants a stream."""
        return self.body.stream

    async def whole(self) -> bytes:
        """Wait for the output; return the answer as JSON."""
        self.newest[0] = snapshot = await self._answer.stream.last()
        completion = snapshot.completions[0]
        content = whole_blocks(self._visible(self._parts.advance(completion)), self._new_call_id)
        usage = await self._end()
        return msgspec.json.encode(self._message(content, usage, self._stop(completion)))

    def events(self, ended: Callable[[], None]) -> EventStream[RequestSnapshot]:
        """The events of a stream. ended: called before the last ones are sent."""

        async def last() -> bytes:
            usage = await self._end()
            ended()
            stop = self._stop(self.newest[0].completions[0])
            end = event("message_delta", delta=stop, usage=usage) + event("message_stop")
            return self._events.finish() + end

        return EventStream(
            self._answer.stream.snapshots, self._event, last, lambda error: error_event(error, self._request_id)
        )

    def _event(self, snapshot: RequestSnapshot) -> bytes | None:
        """The events of what is new; None if nothing is."""
        seen, self.newest[0] = self.newest.get(0), snapshot
        new = self._parts.advance(snapshot.completions[0], seen and seen.completions[0])
        events = self._events.push(self._visible(new))
        if seen is None:
            return (
                event("message_start", message=self._message([], _usage(usage_of([snapshot])), _ended(None))) + events
            )
        return events or None

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any], stop: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": usage | {"cache_creation": None, "inference_geo": None, "service_tier": "standard"},
        }

    def _visible(self, parts: Iterable[Part]) -> list[Part]:
        """The parts that the client gets, after its field `thinking`."""
        thinking = self.body.thinking
        if thinking is None or (thinking.type != "disabled" and thinking.display != "omitted"):
            return list(parts)
        hidden = [] if thinking.type == "disabled" else [TextPart("reasoning", "")]
        made = list[Part]()
        for part in parts:
            made += hidden if isinstance(part, TextPart) and part.kind == "reasoning" else [part]
        return made

    async def _end(self) -> dict[str, Any]:
        """Count the tokens of the request."""
        self.usage = usage_of(self.newest.values(), await self._answer.end(self.newest[0], [self._parts]))
        return _usage(self.usage)

    def _stop(self, completion: CompletionSnapshot) -> dict[str, Any]:
        """The reason for which the answer ended, and the sequence that ended it."""
        sequence = completion.stop_reason
        reason = self._parts.finish_reason(completion)
        if reason == "stop" and isinstance(sequence, str) and sequence in (self.body.stop_sequences or []):
            return _ended("stop_sequence", sequence)
        if reason == "length":
            count = completion.num_tokens - len(self.newest[0].prompt_token_ids)
            return _ended("max_tokens" if count >= self.body.max_tokens else "model_context_window_exceeded")
        return _ended("tool_use" if reason == "tool_calls" else "end_turn")


def _ended(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    """The fields that say why an answer ended."""
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """The usage in this API's form, in which input tokens are those that were in no cache."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
        "server_tool_use": None,
    }
