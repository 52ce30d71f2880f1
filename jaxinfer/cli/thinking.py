"""Thinking in an answer: a text from `<think>` to `</think>` at its beginning, which may come in pieces."""

import contextlib
import sys
from typing import Literal

import typer

from jaxinfer.generation.stop_strings import StopStrings
from jaxinfer.progress import long_work

BEGIN, END = "<think>", "</think>"


class Thinking:
    """Divides an answer that grows into thinking and the rest. A tag that is not complete yet waits.

    opened: whether the prompt ends in `<think>`, so that the answer begins inside.

    >>> answer = Thinking()
    >>> [answer.push(piece) for piece in ("<thi", "nk>Hm", "m.</think>4")]
    [[], [('<think>Hm', True)], [('m.</think>', True), ('4', False)]]
    """

    def __init__(self, *, opened: bool = False):
        self._state: Literal["begins", "thinks", "answers"] = "thinks" if opened else "begins"
        self._waiting, self._end = "", StopStrings((END,))

    def push(self, piece: str) -> list[tuple[str, bool]]:
        """Return the texts that this piece completes, each with whether it is thinking."""
        text, self._waiting = self._waiting + piece, ""
        if self._state == "begins":
            begun = text.lstrip()
            if BEGIN.startswith(begun):
                self._waiting = text
                return []
            self._state = "thinks" if begun.startswith(BEGIN) else "answers"
        if self._state == "answers":
            return [(text, False)] if text else []
        self._end.forget()
        if place := self._end.push(text):
            self._state, end = "answers", place[0] + len(END)
            return [(text[:end], True), *([(text[end:], False)] if text[end:] else [])]
        shown = len(text) - self._end.num_begun
        self._waiting = text[shown:]
        return [(text[:shown], True)] if shown else []

    def flush(self) -> list[tuple[str, bool]]:
        """Return the text that has waited; no piece follows."""
        rest, self._waiting = self._waiting, ""
        return [(rest, self._state == "thinks")] if rest else []


class AnswerPrinter:
    """Prints an answer as it comes, with thinking dimmed in a terminal, or hidden.

    Args:
      opened: as in `Thinking`.
      hide: whether thinking is not printed; a line on stderr says meanwhile that the model thinks.
    """

    def __init__(self, *, opened: bool, hide: bool):
        self._thinking, self._hide = Thinking(opened=opened), hide
        self._taken, self._hid = 0, False
        self._line = contextlib.ExitStack()

    def show(self, text: str) -> None:
        """Print what is new in the answer so far."""
        new, self._taken = text[self._taken :], len(text)
        self._print(self._thinking.push(new))

    def end(self) -> None:
        """Print what has waited, and end the line."""
        self._print(self._thinking.flush())
        self._line.close()
        print(flush=True)

    def _print(self, texts: list[tuple[str, bool]]) -> None:
        for text, thinking in texts:
            if thinking and self._hide:
                if not self._hid:
                    self._line.enter_context(long_work("thinking"))
                self._hid = True
                continue
            shown = text.lstrip() if self._hid else text  # the blank lines after the thinking
            if not shown:
                continue
            self._line.close()
            self._hid = False
            print(typer.style(shown, dim=True) if thinking and sys.stdout.isatty() else shown, end="", flush=True)
