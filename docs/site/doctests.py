"""Doctests of docstrings as blocks of code: Markdown would take `>>>` for quotations."""

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
    """A doctest without the options that only doctest reads."""
    return f"```python\n{re.sub(r' *# doctest: .*', '', match[0]).rstrip()}\n```\n"
