"""The tokenizer of a model directory."""

from pathlib import Path
from typing import TypedDict, Unpack

import tokenizers

from jaxinfer.checkpoints import read_file
from jaxinfer.models.files.description import TruncationSide
from jaxinfer.sandbox.templates import render
from jaxinfer.text.chat_template import ChatOptions, ChatTemplates, Messages, Renderer, check_messages, require_text

TOKENIZER = "tokenizer.json"
PIECE = 2**20
"""Characters of a text that are encoded at once to learn whether all of it is too long."""
PIECE_TOKENS = 1024
"""Tokens that a text may have in fewer when it is not divided."""


class TruncationOptions(TypedDict, total=False):
    """Options of `Tokenizer.encode`."""

    max_tokens: int | None
    truncation_side: TruncationSide


class _NamedPanics:
    """Raises ValueError for a panic of the tokenizers library, which is no Exception and would end a whole thread."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"tokenizer.json is damaged, or the tokenizers library has a mistake: {error}") from error


class Tokenizer:
    """A model directory's `tokenizer.json`, with its chat templates if it has any."""

    def __init__(self, folder: Path):
        if (content := read_file(folder, TOKENIZER)) is None:
            raise ValueError(f"{folder}: no {TOKENIZER}; send token ids, or convert the model with its tokenizer.")
        with _NamedPanics():
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_ids = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self.byte_values = self._byte_values()
        self.joins_bytes = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self._texts: dict[int, str | None] = {}
        self.chat_templates = ChatTemplates(folder)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """Load the tokenizer of a model directory; None if it has none."""
        return cls(folder) if read_file(folder, TOKENIZER) is not None else None

    def to_json(self) -> str:
        """The text of its `tokenizer.json`."""
        return self._tokenizer.to_str()

    def special_id(self, text: str) -> int | None:
        """The special token with this text, which no decoded text has; None if there is none."""
        id_ = self._tokenizer.token_to_id(text)
        return id_ if id_ in self.special_ids else None

    def _byte_values(self) -> dict[int, int]:
        """The bytes that tokens stand for, which the decoder joins to characters (SentencePiece's byte fallback)."""
        ids = [self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        letter = ids[ord("a")]
        joins = letter is not None and self._tokenizer.decode([letter]) == "a"
        return {id_: byte for byte, id_ in enumerate(ids) if id_ is not None} if joins else {}

    def text_of(self, id_: int) -> str | None:
        """The text of one token, special or not; None if there is no such token. Kept, since streams ask for each."""
        if id_ not in self._texts:
            known = self._tokenizer.id_to_token(id_) is not None
            self._texts[id_] = self.decode([id_], skip_special_tokens=False) if known else None
        return self._texts[id_]

    def encode(
        self, text: str, *, max_tokens: int | None = None, truncation_side: TruncationSide = "right"
    ) -> list[int]:
        """Encode a text, with the special tokens the tokenizer adds (Llama's begin-of-text, BERT's frame).

        Args:
          max_tokens: the most tokens, of which the special ones are never cut; None: any number.
          truncation_side: the end of the text that is cut.

        Raises ValueError for half a surrogate pair.
        """
        if max_tokens is not None:
            text = self._begin_of(text, max_tokens, truncation_side)
        ids = self._encode(text, add_special_tokens=True).ids
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        words = self._encode(text, add_special_tokens=False)
        special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        words.truncate(max(max_tokens - special, 0), direction=truncation_side)
        return self._tokenizer.post_process(words, None, add_special_tokens=True).ids

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether a text has more tokens than that, without encoding all of one that is far too long."""
        if len(text) <= PIECE:
            return False  # it is encoded as fast as it is counted
        left = most
        for start in range(0, len(text), PIECE):
            left -= len(self.encode_word(text[start : start + PIECE])) - PIECE_TOKENS
            if left < 0:
                return True
        return False

    def _begin_of(self, text: str, tokens: int, truncation_side: TruncationSide) -> str:
        """Leave out, of a long text, what surely comes after that many tokens, or before on the left."""
        size = PIECE
        while size < len(text):
            part = text[:size] if truncation_side == "right" else text[-size:]
            if len(self.encode_word(part)) > tokens + PIECE_TOKENS:
                return part
            size *= 4
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Character {error.start} of the text is {text[error.start]!r}, half of a surrogate pair, which no "
                "tokenizer can read: leave it out."
            ) from None
        with _NamedPanics():
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_word(self, text: str) -> list[int]:
        """Encode a part of a text, without special tokens."""
        return self._encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids, by default without special tokens."""
        with _NamedPanics():
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def chat(self, messages: Messages, *, renderer: Renderer = render, **options: Unpack[ChatOptions]) -> list[int]:
        """Encode a conversation, by `ChatTemplates.render`. Raises ValueError for an image in it, too."""
        require_text(check_messages(messages))
        return self.encode_word(self.chat_templates.render(messages, renderer=renderer, **options))
