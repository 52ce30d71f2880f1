"""The content of an answer as blocks: whole, and as the events of a stream."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from jaxinfer.text.parsing import Part, TextPart, ToolCall


def event(name: str, **fields: Any) -> bytes:
    """A server-sent event of the Messages API."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


def whole_blocks(parts: Iterable[Part], new_call_id: Callable[[], str]) -> list[dict[str, Any]]:
    """The blocks of a whole answer: texts of one kind that follow each other are one block."""
    blocks = list[dict[str, Any]]()
    for kind, group in itertools.groupby(parts, key=lambda part: part.kind if isinstance(part, TextPart) else None):
        if kind is not None:
            blocks.append(_text_block(kind, "".join(part.text for part in group if isinstance(part, TextPart))))
        else:
            calls = [part for part in group if isinstance(part, ToolCall)]
            blocks += [_call_block(call, new_call_id(), msgspec.Raw(call.arguments.encode())) for call in calls]
    return blocks


def _text_block(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _call_block(call: ToolCall, id: str, input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": call.name, "input": input, "caller": {"type": "direct"}}


class BlockEvents:
    """Writes events of blocks that follow each other, the same blocks as `whole_blocks`.

    new_call_id: makes an id for a call.
    """

    def __init__(self, new_call_id: Callable[[], str]):
        self._new_call_id, self._index, self._open = new_call_id, 0, None

    def push(self, parts: Iterable[Part]) -> bytes:
        """Return the events of further parts."""
        return b"".join(self._call(part) if isinstance(part, ToolCall) else self._text(part) for part in parts)

    def finish(self) -> bytes:
        """Return the events that end the last block."""
        if self._open is None:
            return b""
        end = self._delta(type="signature_delta", signature="") if self._open == "reasoning" else b""
        return end + self._stop()

    def _text(self, part: TextPart) -> bytes:
        events = b""
        if self._open != part.kind:
            events = self.finish() + self._start(_text_block(part.kind, ""))
            self._open = part.kind
        if not part.text:
            return events
        if part.kind == "reasoning":
            return events + self._delta(type="thinking_delta", thinking=part.text)
        return events + self._delta(type="text_delta", text=part.text)

    def _call(self, call: ToolCall) -> bytes:
        """A block of a call, of which the start alone has the id and the name."""
        start = self.finish() + self._start(_call_block(call, self._new_call_id(), {}))
        return start + self._delta(type="input_json_delta", partial_json=call.arguments) + self._stop()

    def _start(self, block: dict[str, Any]) -> bytes:
        return event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        self._index, self._open, index = self._index + 1, None, self._index
        return event("content_block_stop", index=index)
