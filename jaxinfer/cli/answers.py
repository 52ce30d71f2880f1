"""Answers on standard output, as they come."""

import contextlib
import sys

import typer

from jaxinfer.progress import long_work
from jaxinfer.text.parsing import AnswerParser, Part, TextPart


class AnswerPrinter:
    """Prints an answer as it comes: in a terminal with its reasoning dimmed, or without it.

    Where standard output is no terminal, an answer whose reasoning is not hidden is printed as the model wrote it.

    Args:
      parser: tells the parts of the answer apart.
      hide: whether reasoning is not printed; a line on stderr says meanwhile that the model thinks.

    Attributes:
      content: the answer so far without its reasoning.
    """

    def __init__(self, parser: AnswerParser, *, hide: bool):
        self._parser, self._hide, self._as_written = parser, hide, not hide and not sys.stdout.isatty()
        self._taken, self._after_reasoning, self.content = 0, False, ""
        self._line = contextlib.ExitStack()

    def show(self, text: str) -> None:
        """Print what is new in the answer so far."""
        new, self._taken = text[self._taken :], len(text)
        self._take(self._parser.push(new))
        if self._as_written:
            print(new, end="", flush=True)

    def end(self) -> None:
        """Print what has waited, and end the line."""
        self._take(self._parser.finish())
        self._line.close()
        print(flush=True)

    def _take(self, parts: list[Part]) -> None:
        for part in parts:
            assert isinstance(part, TextPart), "no tools were offered"
            if part.kind == "content":
                self.content += part.text
            if not self._as_written:
                self._print(part)

    def _print(self, part: TextPart) -> None:
        if part.kind == "reasoning":
            if not self._hide:
                print(typer.style(part.text, dim=True), end="", flush=True)
            elif not self._after_reasoning:
                self._line.enter_context(long_work("thinking"))
            self._after_reasoning = True
            return
        self._line.close()
        if self._after_reasoning and not self._hide:
            print("\n\n", end="")
        self._after_reasoning = False
        print(part.text, end="", flush=True)
