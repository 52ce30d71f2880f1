"""The output of a response: its items, and the events that tell of them while they grow."""

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from jaxinfer.http.responses.conversation import PLAIN
from jaxinfer.text.parsing import Part, TextPart, ToolCall


def new_id(prefix: str) -> str:
    """An id of a response or an item, which nobody can guess."""
    return f"{prefix}_{secrets.token_hex(24)}"


class EventWriter:
    """Numbers events, and keeps them as they are to be sent until they are taken."""

    def __init__(self) -> None:
        self._count, self._waiting = 0, bytearray()

    def write(self, kind: str, **fields: Any) -> None:
        """Write an event."""
        data = msgspec.json.encode({"type": kind, "sequence_number": self._count, **fields})
        self._count += 1
        self._waiting += b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def take(self) -> bytes:
        """Return the new events."""
        taken, self._waiting = bytes(self._waiting), bytearray()
        return taken


class ResponseOutput:
    """The items of a response. Each is as in its events, with the same id.

    Args:
      events: takes the events.
      new_call_id: makes the id of a call.
      encrypted: whether reasoning has `encrypted_content`.

    Attributes:
      items: the items so far.
    """

    def __init__(self, events: EventWriter, new_call_id: Callable[[], str], *, encrypted: bool):
        self._events, self._new_call_id, self._encrypted = events, new_call_id, encrypted
        self.items = list[dict[str, Any]]()
        self._open: str | None = None  # the kind of text that the last item takes
        self._text = list[str]()

    def add(self, part: Part) -> None:
        """Add a part of the answer."""
        if isinstance(part, ToolCall):
            self.close()
            self._add_call(part)
        else:
            self._add_text(part)

    def close(self, status: str = "completed") -> None:
        """End the last item, if it is open."""
        if self._open is None:
            return
        item, text, kind = self.items[-1], "".join(self._text), _TEXT_TYPES[self._open]
        part = item["content"][0] = _part(kind, text)
        if item["type"] == "reasoning" and self._encrypted:
            item["encrypted_content"] = PLAIN + text
        item["status"] = status
        logprobs = {"logprobs": []} if kind == "output_text" else {}
        self._tell(f"{kind}.done", item_id=item["id"], content_index=0, text=text, **logprobs)
        self._tell("content_part.done", item_id=item["id"], content_index=0, part=part)
        self._tell("output_item.done", item=item)
        self._open, self._text = None, []

    def _add_text(self, part: TextPart) -> None:
        if part.kind != self._open:
            self.close()
            self._begin(part)
        self._text.append(part.text)
        if not part.text:
            return
        kind, id = _TEXT_TYPES[part.kind], self.items[-1]["id"]
        logprobs = {"logprobs": []} if kind == "output_text" else {}
        self._tell(f"{kind}.delta", item_id=id, content_index=0, delta=part.text, **logprobs)

    def _begin(self, part: TextPart) -> None:
        """Begin an item that takes text."""
        item: dict[str, Any] = {"status": "in_progress", "content": []}
        if part.kind == "reasoning":
            item = {"id": new_id("rs"), "type": "reasoning", "summary": [], **item}
        else:
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", **item}
        self.items.append(item)
        self._open = part.kind
        self._tell("output_item.added", item=item)
        item["content"] = [_part(_TEXT_TYPES[part.kind], "")]
        self._tell("content_part.added", item_id=item["id"], content_index=0, part=item["content"][0])

    def _add_call(self, call: ToolCall) -> None:
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "call_id": self._new_call_id(),
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        self._tell("output_item.added", item=item)
        self._tell("function_call_arguments.delta", item_id=item["id"], delta=call.arguments)
        self._tell("function_call_arguments.done", item_id=item["id"], name=call.name, arguments=call.arguments)
        item |= {"arguments": call.arguments, "status": "completed"}
        self._tell("output_item.done", item=item)

    def _tell(self, what: str, **fields: Any) -> None:
        """Write an event about the last item."""
        self._events.write(f"response.{what}", output_index=len(self.items) - 1, **fields)


_TEXT_TYPES = {"content": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str, text: str) -> dict[str, Any]:
    """A part of an item's content."""
    part: dict[str, Any] = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part
