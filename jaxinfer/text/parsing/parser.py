"""A state machine that tells the parts of an answer apart, for families that write markers into the text."""

import abc
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

MAX_ENDS = 8
"""How many closing markers a call may have in its own text. A bound, since each of them costs a look at all of it."""


Kind = Literal["reasoning", "content"]


class TextPart(NamedTuple):
    """Reasoning or content, or a piece of it."""

    kind: Kind
    text: str


class ToolCall(NamedTuple):
    """A call of a function. arguments: a JSON object, as text."""

    name: str
    arguments: str


Part = TextPart | ToolCall
Schemas = Mapping[str, dict[str, Any]]
"""The schemas of functions' parameters, by the functions' names."""


class NotACallError(Exception):
    """A text is no call, whatever follows."""


class IncompleteCallError(Exception):
    """A text ends within a call."""


class ReasoningTags(NamedTuple):
    """The markers around reasoning at the beginning of an answer."""

    begin: str
    end: str


class CallSyntax(NamedTuple):
    """The way in which a family of models writes calls.

    Attributes:
      begin: the marker before a call, or before several.
      end: the marker after them; None: the next `begin`, or the end of the answer.
      parse: reads the text between both. Raises NotACallError, IncompleteCallError.
      ignored: markers without a meaning.
      others: further markers that `parse` needs.
      bare: whether an answer may also be nothing but calls, without markers; `parse` then reads all of it.
      forced: whether the answer is nothing but calls, since a grammar says so.
      closed: whether a call needs `end`, since without it arguments may be missing.
    """

    begin: str | None
    end: str | None
    parse: Callable[[str, Schemas], list[ToolCall]]
    ignored: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    bare: bool = False
    forced: bool = False
    closed: bool = False


class AnswerParser(abc.ABC):
    """Tells the parts of one answer apart.

    Attributes:
      in_reasoning: whether the text so far ends within reasoning.
    """

    in_reasoning: bool

    @abc.abstractmethod
    def push(self, piece: str) -> list[Part]:
        """Return the parts that a piece of the text completes, or brings forth; often none."""

    @abc.abstractmethod
    def finish(self) -> list[Part]:
        """Return the parts that were waiting; no piece follows."""


class Trimmed:
    """Texts without the blanks between parts.

    Blanks wait until something follows them. Those between reasoning, content and calls are dropped; those around an
    answer that is content alone are kept.
    """

    def __init__(self) -> None:
        self._blanks, self._after_part = "", False

    def add(self, kind: Kind, text: str) -> list[Part]:
        """Return the text that can be given."""
        if not self._blanks and not self._after_part and text and not text[-1].isspace():
            return [TextPart(kind, text)]
        text = self._blanks + text
        if self._after_part:
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if not kept:
            return []
        self._after_part = False
        return [TextPart(kind, kept)]

    def end_part(self) -> None:
        """Note that another part begins."""
        self._blanks, self._after_part = "", True

    def finish(self) -> list[Part]:
        """Return the blanks at the end of content."""
        blanks, self._blanks = self._blanks, ""
        return [TextPart("content", blanks)] if blanks and not self._after_part else []


class MarkerParser(AnswerParser):
    """Reads answers with markers.

    Args:
      reasoning: the markers of reasoning; None: there is none.
      calls: the way in which calls are written; None: everything after the reasoning is content.
      schemas: the functions' parameters.
      opened: whether the prompt ends within reasoning.

    >>> parser = MarkerParser(ReasoningTags("<think>", "</think>"), None)
    >>> [part for piece in ("<thi", "nk>Hm", "m.</think>4") for part in parser.push(piece)][1:]
    [TextPart(kind='reasoning', text='m.'), TextPart(kind='content', text='4')]
    """

    def __init__(
        self,
        reasoning: ReasoningTags | None,
        calls: CallSyntax | None,
        schemas: Schemas | None = None,
        *,
        opened: bool = False,
    ):
        self._reasoning, self._calls, self._schemas, self._opened = reasoning, calls, schemas or {}, opened
        self._buffer, self._trimmed, self._looked = "", Trimmed(), 0
        self._go_on(self._begin if reasoning else self._begin_content)
        markers = [] if calls is None else [marker for marker in (calls.begin, *calls.ignored) if marker]
        self._content_markers = _Markers(markers)
        self._reasoning_markers = _Markers([reasoning.end, *markers] if reasoning else [])
        self._text_state = self._content  # to which a text returns that is no call

    def push(self, piece: str) -> list[Part]:
        if not self._buffer and self._is_plain(piece):  # as most pieces are
            return self._trimmed.add(self._kind, piece)
        self._buffer += piece
        return list(self._parts(final=False))

    def finish(self) -> list[Part]:
        parts = list(self._parts(final=True))
        if self._state == self._reason:
            self._trimmed.end_part()
        return [*parts, *self._trimmed.finish()]

    def _parts(self, *, final: bool) -> Iterator[Part]:
        """Yield parts until the state needs more text."""
        waits = False
        while not waits:
            parts, waits = self._state(final)
            yield from parts

    def _go_on(self, state: Callable[[bool], tuple[list[Part], bool]]) -> None:
        """Change the state."""
        self._state, self._is_plain = state, _never
        self._kind: Kind = "content"
        self.in_reasoning = state == self._reason or (self._opened and state == self._begin)
        if state == self._content:
            self._is_plain = self._content_markers.firsts.isdisjoint
        elif state == self._reason:
            self._kind, self._is_plain = "reasoning", self._reasoning_markers.firsts.isdisjoint

    # States: each takes from the buffer, and returns the parts and whether it waits for more text.

    def _begin(self, final: bool) -> tuple[list[Part], bool]:
        assert self._reasoning is not None
        text = self._buffer.lstrip()
        if not final and self._reasoning.begin.startswith(text) and text != self._reasoning.begin:
            return [], True
        if text.startswith(self._reasoning.begin):
            self._buffer = text.removeprefix(self._reasoning.begin)
            self._opened = True
        if self._opened:
            self._trimmed.end_part()
        self._go_on(self._reason if self._opened else self._begin_content)
        return [], False

    def _reason(self, final: bool) -> tuple[list[Part], bool]:
        before, marker = self._take_until(self._reasoning_markers, final)
        parts = self._trimmed.add("reasoning", before)
        if marker is None:
            return parts, True
        if self._calls is not None and marker == self._calls.begin:  # reasoning may end with a call alone
            self._begin_call()
            return parts, False
        self._buffer = self._buffer.removeprefix(marker)
        if self._reasoning is not None and marker == self._reasoning.end:
            self._trimmed.end_part()
            self._go_on(self._begin_content)
        return parts, False

    def _begin_content(self, final: bool) -> tuple[list[Part], bool]:
        text = self._buffer.lstrip()
        if self._calls is not None and self._calls.bare:
            if not text:
                return [], True
            if self._calls.forced or text[0] in _BARE:
                self._go_on(self._bare)
                return [], False
        self._go_on(self._content)
        return [], False

    def _bare(self, final: bool) -> tuple[list[Part], bool]:
        """Wait for the end of an answer that may be nothing but calls, as long as it may be."""
        assert self._calls is not None
        key = _FIRST_KEY.match(self._buffer)
        may_be = self._calls.forced or (key[1] in _CALL_KEYS if key else _BEFORE_KEY.match(self._buffer))
        if may_be and not final:
            return [], True
        self._go_on(self._content)
        if not final:
            return [], False
        try:
            calls = self._calls.parse(self._buffer, self._schemas)
        except (NotACallError, IncompleteCallError):
            return [], False
        self._buffer = ""
        self._trimmed.end_part()
        return list(calls), False

    def _content(self, final: bool) -> tuple[list[Part], bool]:
        before, marker = self._take_until(self._content_markers, final)
        parts = self._trimmed.add("content", before)
        if marker is None:
            return parts, True
        assert self._calls is not None
        if marker == self._calls.begin:
            self._begin_call()
        else:
            self._buffer = self._buffer.removeprefix(marker)
            self._trimmed.end_part()
        return parts, False

    def _begin_call(self) -> None:
        assert self._calls is not None
        self._text_state = self._state
        self._go_on(self._call)
        self._looked, self._num_ends = len(self._calls.begin or ""), 0

    def _call(self, final: bool) -> tuple[list[Part], bool]:
        """Read a call, at whose marker the buffer begins. A text that is none belongs to what came before."""
        assert self._calls is not None
        begin_marker = self._calls.begin or ""
        begin, end_marker = len(begin_marker), self._calls.end or begin_marker
        try:
            while (end := self._next_end(end_marker, final)) is not None:
                try:
                    calls = self._calls.parse(self._buffer[begin:end], self._schemas)
                except IncompleteCallError:  # the marker was a part of a value
                    continue
                rest = self._buffer[end:]
                self._buffer = rest if self._calls.end is None else rest.removeprefix(self._calls.end)
                self._go_on(self._content)
                self._trimmed.end_part()
                return list(calls), False
        except NotACallError:
            pass
        else:
            if not final and self._num_ends < MAX_ENDS:
                return [], True
        self._buffer = self._buffer[begin:]
        self._go_on(self._text_state)
        return self._trimmed.add(self._kind, begin_marker), False

    def _next_end(self, marker: str, final: bool) -> int | None:
        """Find the next place where the call may end: before each further marker, and at the end of the answer."""
        if self._num_ends >= MAX_ENDS or self._looked > len(self._buffer):
            return None
        end = self._buffer.find(marker, self._looked)
        if end >= 0:
            self._looked, self._num_ends = end + len(marker), self._num_ends + 1
            return end
        if final and self._calls is not None and not self._calls.closed:
            self._looked = len(self._buffer) + 1
            return len(self._buffer)
        self._looked = max(self._looked, len(self._buffer) - len(marker) + 1)
        return None

    def _take_until(self, markers: "_Markers", final: bool) -> tuple[str, str | None]:
        """Take the text before the first marker, which stays; without one, all that cannot begin one."""
        at, marker = markers.find(self._buffer)
        if marker is None:
            at = len(self._buffer) - (0 if final else markers.num_begun(self._buffer))
        before, self._buffer = self._buffer[:at], self._buffer[at:]
        return before, marker


_BARE = "{[`"
"""The characters with which answers begin that may be nothing but calls."""
# Bounded, since each piece of an answer is matched again.
_FIRST_KEY = re.compile(r'\s*(?:```\w{0,16})?[\s\[{]{0,64}"(\w{1,16})"')
_BEFORE_KEY = re.compile(r'\s*(?:`{1,2}|(?:```\w{0,16})?[\s\[{]{0,64}(?:"\w{0,16})?)\Z')
_CALL_KEYS = frozenset(("name", "type", "function", "arguments", "parameters", "id"))


def _never(piece: str) -> bool:
    return False


class _Markers:
    """Finds the first of some markers, none of which is the beginning of another one.

    Attributes:
      firsts: the characters with which they begin.
    """

    def __init__(self, markers: list[str]):
        self._markers = tuple(markers)
        self._pattern = re.compile("|".join(map(re.escape, markers))) if markers else None
        self.firsts = frozenset(marker[0] for marker in markers)
        self._longest = max(map(len, markers), default=1)

    def find(self, text: str) -> tuple[int, str | None]:
        """Return the place of the first marker, and which one it is; None if there is none."""
        marker = self._pattern.search(text) if self._pattern else None
        return (marker.start(), marker[0]) if marker else (len(text), None)

    def num_begun(self, text: str) -> int:
        """Return how many of the last characters could begin a marker."""
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            if any(marker.startswith(text[start:]) for marker in self._markers):
                return len(text) - start
        return 0
