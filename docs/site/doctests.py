"""Doctests of docstrings as blocks of code, which can be copied, and blocks of their output."""

import doctest
import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*\n?(?:^(?!$).*\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: D102
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(fenced, obj.docstring.value)


def fenced(match: re.Match[str]) -> str:
    """Write statements without prompts and without the options that only doctest reads, and what they print."""
    blocks, statements = [], ""
    for example in doctest.DocTestParser().get_examples(match[0]):
        statements += re.sub(r" *# doctest: .*", "", example.source)
        if example.want:
            blocks += [f"```python\n{statements}```", f"```text\n{example.want}```"]
            statements = ""
    return "\n\n".join([*blocks, *([f"```python\n{statements}```"] if statements else [])]) + "\n"
