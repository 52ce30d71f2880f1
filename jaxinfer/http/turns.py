"""The answers that a model has given: a conversation that goes on gets the tokens that the model wrote.

A chat template writes an answer in its own way: with other blanks in the arguments of a call, or with other tokens for
the same text. The tokens from there on would then be new to the prefix cache, and an agent's every turn would compute
them again.
"""

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxinfer.text import Tokenizer
from jaxinfer.text.parsing import AnswerParser, TextPart, ToolCall

MAX_BYTES = 64 * 2**20
"""The most memory that answers take, of each model."""
TRIED = 8
"""The last answers of a conversation that are looked for."""
OVERHEAD = 512  # bytes of an answer besides its tokens


class Turn(NamedTuple):
    """An answer.

    Attributes:
      length: characters of the prompt before it.
      digest: of the prompt.
      token_ids: those of the prompt and the answer, without the one that ends it.
      end_ids: tokens with which an answer may end.
      parts: what the answer says.
    """

    length: int
    digest: bytes
    token_ids: array[int]
    end_ids: tuple[int, ...]
    parts: list[tuple[str, Any]]


def turn_of(prompt: str, token_ids: Sequence[int], answer: str, end_ids: Sequence[int], parser: AnswerParser) -> Turn:
    """Describe an answer.

    Args:
      prompt: the text of the prompt.
      token_ids: the tokens of the prompt and the answer.
      answer: the answer's text.
      end_ids: as in `Turn`.
      parser: a parser of the answer.
    """
    if token_ids[-1] in end_ids:
        token_ids = token_ids[:-1]
    return Turn(len(prompt), _digest(prompt), array("i", token_ids), tuple(end_ids), parts_of(answer, parser))


class TurnMemory:
    """The latest answers of a model, by the conversations that they answer. Its methods may be called in any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._turns = OrderedDict[bytes, Turn]()
        self._num_bytes, self._max_bytes, self._lock = 0, max_bytes, threading.Lock()

    def remember(self, key: bytes, turn: Turn) -> None:
        """Keep an answer. key: the conversation before it, as `keys_of` names it."""
        with self._lock:
            self._forget(key)
            self._turns[key] = turn
            self._num_bytes += _size(turn)
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._turns)))

    def _forget(self, key: bytes) -> None:
        if (turn := self._turns.pop(key, None)) is not None:
            self._num_bytes -= _size(turn)

    def encode(
        self, text: str, keys: Sequence[bytes], tokenizer: Tokenizer, make_parser: Callable[[], AnswerParser]
    ) -> list[int]:
        """Encode a conversation, with the tokens of its last answer that the model wrote.

        Args:
          text: the conversation.
          keys: the conversations that it goes on from, the longest first.
        """
        for key in keys:
            with self._lock:
                if (turn := self._turns.get(key)) is not None:
                    self._turns.move_to_end(key)
            if turn is not None and (ids := _spliced(turn, text, tokenizer, make_parser)) is not None:
                return ids
        return tokenizer.encode_word(text)


def _size(turn: Turn) -> int:
    return len(turn.token_ids) * turn.token_ids.itemsize + sum(len(str(part)) for part in turn.parts) + OVERHEAD


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _spliced(turn: Turn, text: str, tokenizer: Tokenizer, make_parser: Callable[[], AnswerParser]) -> list[int] | None:
    """Encode a text that begins with a prompt and its answer; None if it does not, or its template changes them."""
    if len(text) <= turn.length or _digest(text[: turn.length]) != turn.digest:
        return None
    rest = text[turn.length :]
    ends = {id_: place for id_ in turn.end_ids if (end := tokenizer.text_of(id_)) and (place := rest.find(end)) >= 0}
    if not ends:
        return None
    end_id = min(ends, key=ends.__getitem__)
    if parts_of(rest[: ends[end_id]], make_parser()) != turn.parts:
        return None
    ids = tokenizer.encode_word(rest[ends[end_id] :])
    return [*turn.token_ids, *ids] if ids[0] == end_id else None


def parts_of(text: str, parser: AnswerParser) -> list[tuple[str, Any]]:
    """Return what a text says: reasoning, content and calls, with arguments as values."""
    parts: list[tuple[str, Any]] = []
    for part in (*parser.push(text), *parser.finish()):
        if isinstance(part, ToolCall):
            parts.append((part.name, json.loads(part.arguments)))
        elif isinstance(part, TextPart) and parts and parts[-1][0] == f"<{part.kind}>":
            parts[-1] = (parts[-1][0], parts[-1][1] + part.text)
        else:
            parts.append((f"<{part.kind}>", part.text))
    return [(kind, value.strip() if isinstance(value, str) else value) for kind, value in parts]


def keys_of(messages: list[dict[str, Any]], **options: Any) -> tuple[bytes, list[bytes]]:
    """Name a conversation, and those that it goes on from, the longest first.

    options: what else its text depends on.
    """
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    cuts = {*answers[-TRIED:], len(messages)}
    hashed = hashlib.blake2b(msgspec.json.encode(options, order="sorted"), digest_size=16)
    keys = []
    for index in range(len(messages) + 1):
        if index in cuts:
            keys.append(hashed.digest())
        if index < len(messages):
            hashed.update(msgspec.json.encode(messages[index], order="sorted") + b"\0")
    *before, whole = keys
    return whole, before[::-1]
