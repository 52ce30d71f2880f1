"""Prose that is written into Markdown pages, whose lines `tests/test_markdown.py` measures."""

import textwrap

WIDTH = 120


def wrapped(text: str, *, indent: int = 0) -> str:
    """A paragraph in lines of WIDTH, all but the first indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
