"""Rendering chat templates, which are code from whoever wrote them: in Jinja's sandbox."""

import datetime
import functools
import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 2**23
"""Characters of a prompt, of a conversation, and of what it is rendered to: a context of two million tokens."""


def render(template: str, arguments: dict[str, Any]) -> str:
    """Render a template.

    Raises ValueError if it cannot be read, refuses the arguments, fails, or writes too much; and MemoryError.
    """
    try:
        text = _compiled(template).render(arguments)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"The chat template cannot be read, in line {error.lineno}: {error}") from error
    except jinja2.TemplateError as error:
        raise ValueError(f"The chat template refuses these messages: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever its code raises
        raise ValueError(f"The chat template refuses these messages: {type(error).__name__}: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"The chat template writes {len(text):,} characters, at most {MAX_CHARACTERS:,}.")
    return text


class _Generation(Extension):
    """{% generation %}, which marks the assistant's text for training: rendered as its content alone."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Python does; Jinja's own filter escapes characters that are special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


@functools.lru_cache(maxsize=32)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)
