"""The responses that later requests can continue, in a bounded memory. The least recently used are dropped."""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from jaxinfer.fields import shown
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.responses.bodies import InputItem

MAX_BYTES = 64 << 20
"""Bytes of JSON that a server stores."""

_decode_items = msgspec.json.Decoder(list[InputItem]).decode


class _Stored(NamedTuple):
    response: bytes
    conversation: bytes
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.conversation)


class ResponseStore:
    """Responses as JSON, each with its conversation.

    Args:
      max_bytes: bytes of JSON that are kept.

    Attributes:
      num_bytes: bytes of JSON that there are.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._stored = collections.OrderedDict[str, _Stored]()
        self._owners = dict[str, str]()

    def put(self, id: str, response: bytes, conversation: Sequence[InputItem], item_ids: Iterable[str]) -> None:
        """Store a response.

        Args:
          id: its id.
          response: its JSON.
          conversation: all items, from the first request's input to this response's output.
          item_ids: the ids of its output.
        """
        stored = _Stored(response, msgspec.json.encode(conversation), tuple(item_ids))
        self._stored[id] = stored
        self._owners.update(dict.fromkeys(stored.item_ids, id))
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def response(self, id: str) -> bytes:
        """The JSON of a response. Raises BadRequestError."""
        return self._find(id, "response_id").response

    def conversation(self, id: str) -> list[InputItem]:
        """The items of a response's conversation, for a request that continues it. Raises BadRequestError."""
        return _decode_items(self._find(id, "previous_response_id").conversation)

    def item(self, id: str | None) -> InputItem:
        """An item of a response's output. Raises BadRequestError."""
        owner = self._owners.get(id or "", "")
        if owner not in self._stored:
            raise _unknown("item", id, "input")
        return next(item for item in self.conversation(owner) if item.id == id)

    def delete(self, id: str) -> None:
        """Delete a response. Raises BadRequestError."""
        self._find(id, "response_id")
        self._drop(id)

    def _find(self, id: str, param: str) -> _Stored:
        if (stored := self._stored.get(id)) is None:
            raise _unknown("response", id, param)
        self._stored.move_to_end(id)
        return stored

    def _drop(self, id: str) -> None:
        stored = self._stored.pop(id)
        self.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            del self._owners[item_id]


def _unknown(what: str, id: str | None, param: str) -> BadRequestError:
    return BadRequestError(
        f"there is no {what} {shown(id)}: it was not stored, or was deleted, or made room for newer ones.",
        param=param,
        status=404,
        code="previous_response_not_found" if param == "previous_response_id" else "not_found",
    )
