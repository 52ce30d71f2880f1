"""A limit of the tokens of reasoning, after which the model must go on with its answer."""

from collections.abc import Callable


class ReasoningLimit:
    """Counts the tokens between the markers of reasoning, and says what must follow when all are used.

    `copy.copy` makes another one, which continues independently.

    Args:
      budget: how many tokens reasoning may take; a character of several tokens that it has begun comes to its end.
      tags: the markers around it; an empty first one means that the prompt ends within reasoning.
      end_ids: the tokens of the second marker.
      decode: returns the bytes of a token.
    """

    def __init__(self, budget: int, tags: tuple[str, str], end_ids: tuple[int, ...], decode: Callable[[int], bytes]):
        self._left, self._end_ids, self._decode = budget, end_ids, decode
        self._begin, self._end = (tag.encode() for tag in tags)
        self._tail, self._begun, self._over = b"", not self._begin, False
        self._forced = end_ids if self._begun and budget == 0 else ()

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any."""
        return self._forced[0] if self._forced else None

    def accept_token(self, token: int) -> None:
        """Count a token."""
        if self._over:
            return
        if self._forced:
            self._forced = self._forced[1:]
            self._over = not self._forced
            return
        self._tail += self._decode(token)
        if self._begun:
            self._left -= 1
        else:
            self._look_for_begin()
        if not self._begun or self._over:
            return
        if self._end in self._tail:
            self._over = True
        elif self._left <= 0 and not _within_character(self._tail):
            self._forced = self._end_ids
        else:
            self._tail = self._tail[-len(self._end) :]

    def _look_for_begin(self) -> None:
        text = self._tail.lstrip()
        if text.startswith(self._begin):
            self._begun, self._tail = True, text.removeprefix(self._begin)
        else:
            self._over = not self._begin.startswith(text)


def _within_character(text: bytes) -> bool:
    """Check whether a text, which may begin within a character, ends within one."""
    try:
        text.lstrip(_CONTINUATION).decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


_CONTINUATION = bytes(range(0x80, 0xC0))
