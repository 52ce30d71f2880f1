"""Text that grows by tokens."""

from collections.abc import Collection, Sequence

from jaxinfer.text.tokenizer import Tokenizer

PROMPT_TOKENS = 6
"""How many of a prompt's last tokens are decoded together with the first output token."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Written by decoders for bytes that are no character, or not yet."""


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

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True):
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
