"""The answers of GPT-OSS: messages in channels, each with a header (OpenAI's harmony format).

The prompt ends in `<|start|>assistant`. An answer is `<|channel|>analysis<|message|>...<|end|>`, then
`<|start|>assistant<|channel|>final<|message|>...`, or a call: `<|start|>assistant<|channel|>commentary
to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
"""

import re

from jaxinfer.text.parsing.calls import arguments_of
from jaxinfer.text.parsing.parser import (
    AnswerParser,
    IncompleteCallError,
    NotACallError,
    Part,
    ToolCall,
    Trimmed,
)

MESSAGE, START = "<|message|>", "<|start|>"
ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
HEADS = ("<|channel|>", START, MESSAGE, "<|constrain|>", "to=")
"""How a header begins."""
RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<\||\Z)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
LONGEST_END = len("<|return|>")
PREFIX = "functions."
_PARTIAL = re.compile(r"<(?:\|\w*\|?)?\Z")


class HarmonyParser(AnswerParser):
    """Reads answers in channels: "analysis" is reasoning, a message to a function a call, everything else content.

    calls: whether messages to functions are calls, and not content.
    """

    def __init__(self, *, calls: bool = True):
        self._calls, self._trimmed = calls, Trimmed()
        self._header, self._buffer = "", ""
        self._in_message, self._started, self.in_reasoning = False, False, False
        self._recipient: str | None = None  # the function that the message calls
        self._looked = 0  # where an end of the message may begin

    def _begin_message(self, header: str) -> None:
        """Begin a message; an empty header stands for content."""
        self._header, self._in_message, self._looked = header, True, 0
        recipient, channel = RECIPIENT.search(header), CHANNEL.search(header)
        calls = self._calls and recipient is not None and recipient[1].startswith(PREFIX)
        self._recipient = recipient[1].removeprefix(PREFIX) or None if calls and recipient else None
        self.in_reasoning = channel is not None and channel[1] == "analysis" and self._recipient is None

    def push(self, piece: str) -> list[Part]:
        self._buffer += piece
        return self._scan(final=False)

    def finish(self) -> list[Part]:
        parts = self._scan(final=True)
        if self.in_reasoning:
            self._trimmed.end_part()
        return [*parts, *self._trimmed.finish()]

    def _scan(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while (self._message if self._in_message else self._head)(parts, final):
            pass
        return parts

    def _head(self, parts: list[Part], final: bool) -> bool:
        """Read a header; a text without one is content."""
        text = self._buffer.lstrip()
        heads = ("assistant", *HEADS) if self._started else HEADS
        if text and not any(text.startswith(head) or (not final and head.startswith(text)) for head in heads):
            self._begin_message("")
            return True
        header, marker, rest = self._buffer.partition(MESSAGE)
        if not marker:
            if final:
                self._buffer = ""
                if RECIPIENT.search(header):  # of a call, which is cut off
                    parts += self._trimmed.add("content", header)
            return False
        self._buffer = rest
        self._begin_message(header)
        self._trimmed.end_part()
        return True

    def _message(self, parts: list[Part], final: bool) -> bool:
        end = ENDS.search(self._buffer, self._looked)
        if (recipient := self._recipient) is not None:
            if end is None and not final:
                self._looked = max(len(self._buffer) - LONGEST_END, 0)
                return False
            text = self._buffer[: end.start()] if end else self._buffer
            try:
                parts.append(ToolCall(recipient, arguments_of(text)))
            except (NotACallError, IncompleteCallError):
                parts += self._trimmed.add("content", self._header + MESSAGE + text)
            self._trimmed.end_part()
        else:
            partial = None if final or end else _PARTIAL.search(self._buffer)
            text = self._buffer[: end.start() if end else partial.start() if partial else len(self._buffer)]
            parts += self._trimmed.add("reasoning" if self.in_reasoning else "content", text)
        if end is None:
            self._buffer = "" if recipient is not None else self._buffer[len(text) :]
            if recipient is not None:
                self._in_message = False
            return False
        if self.in_reasoning:
            self._trimmed.end_part()
            self.in_reasoning = False
        self._buffer, self._in_message, self._started = self._buffer[end.end() :], False, end[0] == START
        return True
