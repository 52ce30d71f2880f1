"""Conversion between text and token ids: prompts, the tokenizer of a model directory, text that grows by tokens."""

from collections.abc import Collection, Sequence
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack, cast

import numpy as np
import tokenizers
from msgspec import Meta

from jaxinfer.checkpoints import read_file
from jaxinfer.fields import check, shown
from jaxinfer.generation.chat_template import ChatOptions, ChatTemplates, Messages, Renderer
from jaxinfer.models.files.description import SentenceConfig, TruncationSide
from jaxinfer.sandbox.templates import MAX_CHARACTERS, render

Prompt = str | list[int]
"""The input of a model: a text, or token ids."""
TOKENIZER = "tokenizer.json"
PROMPT_TOKENS = 6
"""How many of a prompt's last tokens are decoded together with the first output token."""
PIECE = 2**20
"""Characters of a text that are encoded at once to learn whether all of it is too long."""
PIECE_TOKENS = 1024
"""Tokens that a text may have in fewer when it is not divided."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Written by decoders for bytes that are no character, or not yet."""

_TokenIds = Annotated[list[int], Meta(description="a text, or a list of token ids (integers)")]


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
        """Encode a conversation, by `ChatTemplates.render`."""
        return self.encode_word(self.chat_templates.render(messages, renderer=renderer, **options))

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> "TextStream":
        """Begin a text that follows a prompt and grows with the tokens pushed to it."""
        return TextStream(self, prompt_ids, skip_special_tokens=skip_special_tokens)


def as_list[T](prompts: T | Sequence[T]) -> list[T]:
    """One prompt or several as a list; a list that begins with a number is one prompt. Lists are copied."""
    prompts = copied(prompts)
    if not isinstance(prompts, list) or (prompts and _is_number(prompts[0])):
        return [cast(T, prompts)]
    return [copied(prompt) for prompt in prompts]


def copied(prompts: Any) -> Any:
    """Copy lists and arrays to lists; return anything else as it is."""
    if hasattr(prompts, "__array__"):
        return np.asarray(prompts).tolist()
    others = str | bytes | bytearray | memoryview
    return list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, others) else prompts


def _is_number(value: object) -> bool:
    return isinstance(value, Number) or getattr(value, "shape", None) == ()


def encode_prompt(
    tokenizer: Tokenizer | None, prompt: Prompt, vocab: int, **cut: Unpack[TruncationOptions]
) -> list[int]:
    """Return a prompt's token ids, in a new list. cut: how a text is cut, as in `Tokenizer.encode`.

    Raises ValueError for an invalid prompt, text without a tokenizer, and ids outside [0, vocab).
    """
    if not isinstance(prompt, str):
        ids = check("The prompt", prompt, _TokenIds)
    elif tokenizer is None:
        raise ValueError("The model directory has no tokenizer: give the prompt as token ids.")
    else:
        ids = tokenizer.encode(prompt, **cut)
    if unknown := [i for i in ids if not 0 <= i < vocab]:
        raise ValueError(f"Token ids {shown(unknown[:5])} of the prompt are outside the vocabulary [0, {vocab}).")
    return ids


def check_length(tokenizer: Tokenizer | None, prompt: Prompt, context: int) -> None:
    """Raise ValueError for a text that is far longer than the context, which would take long to encode."""
    if not isinstance(prompt, str) or tokenizer is None:
        return
    if len(prompt) > MAX_CHARACTERS or tokenizer.exceeds(prompt, context):
        raise ValueError(
            f"The prompt has {len(prompt):,} characters, far more than the context of {context} tokens. Shorten the "
            "prompt or raise the context."
        )


def encode_to_embed(
    tokenizer: Tokenizer | None,
    text: str,
    sentence: SentenceConfig,
    *,
    vocab: int,
    context: int,
    prompt: str | None = None,
    truncate: bool = True,
) -> list[int]:
    """Encode a text to embed, after its prompt, cut to what the model takes.

    Args:
      sentence: how the model's texts become tokens.
      context: the most tokens of a request.
      prompt: as in `PoolingParams`.
      truncate: whether a longer text is cut; False: ValueError.

    Raises ValueError as `encode_prompt` does.
    """
    longest = min(sentence.max_seq_length or context, context)
    text = sentence.prompt(prompt) + text
    if truncate:
        return encode_prompt(tokenizer, text, vocab, max_tokens=longest, truncation_side=sentence.truncation_side)
    check_length(tokenizer, text, context)
    ids = encode_prompt(tokenizer, text, vocab)
    if len(ids) > longest:
        raise ValueError(
            f"The text has {len(ids)} tokens and the model takes {longest}; shorten it, or let it be cut, as it is by "
            "default."
        )
    return ids


def encode_chat(
    tokenizer: Tokenizer | None, messages: Messages, *, renderer: Renderer = render, **options: Unpack[ChatOptions]
) -> list[int]:
    """Encode a conversation as a prompt, by `Tokenizer.chat`. Raises ValueError without a tokenizer too."""
    if tokenizer is None:
        raise ValueError("The model directory has no tokenizer, so it cannot chat.")
    return tokenizer.chat(messages, renderer=renderer, **options)


class TextStream:
    """Turns tokens into text as they come; all parts together are the text of the tokens so far, after the prompt's.

    A token is decoded together with some before it, at first the prompt's last ones, because the decoder may depend on
    them (a space that it strips at the beginning of a text, a character of several tokens). A character's first bytes
    wait for the others, or until `flush`.

    Byte tokens give each character once it is complete. A byte that is part of none is a replacement character, and
    changes no other character of its run; many decoders replace the complete run, but only at its end.

    A decoder that joins the bytes of all tokens needs to decode again only if a character may have begun before.

    Args:
      prompt_ids: the tokens before the first one.
      skip_special_tokens: whether the text leaves special tokens out.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt_ids: Sequence[int], *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped: Collection[int] = tokenizer.special_ids if skip_special_tokens else ()
        context = prompt_ids[-PROMPT_TOKENS:]
        self._begin([i for i in context if i not in self._skipped])
        self._bytes, self._num_prompt_bytes = b"", 0  # of a character that is not complete
        for token in self._ids:
            if token in tokenizer.byte_values:
                self._characters(token)
            else:
                self._bytes = b""
        self._num_prompt_bytes = len(self._bytes)
        self._in_bytes = False  # whether the last token was a byte, whose text does not depend on `_ids`
        self._at_start = not self._ids  # where a decoder may strip a space

    def _begin(self, ids: list[int]) -> None:
        """Decode from here on with these tokens as context, whose text has been given."""
        self._ids, self._num_given = ids, len(ids)
        self._given = (self._tokenizer.text_of(ids[0]) or "") if len(ids) == 1 else self._decode(ids)
        self._is_complete = not self._given.endswith(UNFINISHED)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)  # those to be skipped are not among them

    def push(self, token: int) -> str:
        """The text that this token completes, often empty."""
        text = self._tokenizer.text_of(token)
        if text is None or token in self._skipped:
            return ""
        if self._tokenizer.joins_bytes and self._is_complete and UNFINISHED not in text:
            self._ids, self._num_given, self._given = [token], 1, text
            return text
        if token in self._tokenizer.byte_values:
            return self._push_byte(token)
        left = self._leave_bytes() if self._in_bytes or self._bytes else ""
        self._at_start = False
        self._ids.append(token)
        return left + self._take()

    def flush(self) -> str:
        """The text that has waited; no token follows."""
        return self._leave_bytes() + self._take(whole=True)

    def _take(self, *, whole: bool = False) -> str:
        """The new text, by default without an end that may be the first bytes of a character."""
        text = self._decode(self._ids)
        waits = not whole and text.endswith(UNFINISHED)
        if self._given.endswith(UNFINISHED) and not text.startswith(self._given):
            self._given = self._given[: -len(UNFINISHED)]  # the prompt's last character, now complete
        new = text[len(self._given) : len(text) - waits]
        self._is_complete = False
        if new:
            self._begin(self._ids[self._num_given :])
            if waits:
                self._given, self._is_complete = self._given.removesuffix(UNFINISHED), False
        elif not waits and len(self._ids) > self._num_given + 4 * PROMPT_TOKENS:  # a run of tokens without text
            del self._ids[self._num_given : -PROMPT_TOKENS]
        return new

    # Byte tokens

    def _push_byte(self, token: int) -> str:
        waiting = "" if self._in_bytes else self._take(whole=True)
        self._in_bytes = True
        self._ids = [*self._ids, token][-PROMPT_TOKENS:]
        text = self._characters(token)
        if text and self._at_start:
            self._at_start = False
            text = self._decode(self._ids) if len(text) == 1 and text != UNFINISHED else text
        return waiting + text

    def _characters(self, token: int) -> str:
        """Add a byte; returns the characters that are complete now, and a replacement for each byte that is in none."""
        self._bytes += bytes([self._tokenizer.byte_values[token]])
        text = ""
        while self._bytes:
            try:
                text += self._bytes.decode()
            except UnicodeDecodeError as error:
                if error.end == len(self._bytes) and error.reason == "unexpected end of data":
                    break
                text += self._replaced(1)
            else:
                self._bytes, self._num_prompt_bytes = b"", 0
        return text

    def _replaced(self, count: int) -> str:
        """Drop the first bytes; returns a replacement for each that is not the prompt's."""
        of_prompt = min(count, self._num_prompt_bytes)
        self._num_prompt_bytes -= of_prompt
        self._bytes = self._bytes[count:]
        return UNFINISHED * (count - of_prompt)

    def _leave_bytes(self) -> str:
        """End a run of byte tokens; returns the text of those that are in no character."""
        text = self._replaced(len(self._bytes))
        if self._in_bytes:
            self._in_bytes = False
            self._begin(self._ids)
        return text
