"""Grammars in llguidance's notation, and whether they compile."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import llguidance

from jaxinfer.sandbox.json_schemas import change_schemas

LIMITS = llguidance.LLParserLimits(verbose_errors=False)
"""The limits of a grammar. Messages leave out the parser's internal state."""


def check_grammar(*, kind: str, value: Any, whitespace_pattern: str | None) -> None:
    """Raise ValueError for a grammar that no tokens can follow, as far as that shows without a tokenizer.

    Arguments as of `grammar_of`.
    """
    try:
        grammar = grammar_of(kind=kind, value=value, whitespace_pattern=whitespace_pattern)
        message = llguidance.LLMatcher.validate_grammar(grammar, limits=LIMITS) or _follow(grammar)
    except (ValueError, RecursionError) as error:
        message = str(error)
    if message:
        raise ValueError(f"StructuredOutputsParams.{kind} does not compile: {plain(message)}")


def _follow(grammar: str) -> str:
    """Follow a grammar by two bytes, which takes long and may fail for one that compiles quickly; returns the error."""
    state = llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=LIMITS)
    if state.is_error():  # it names tokens, which only a model has
        return ""
    for _ in range(2):
        allowed = state.compute_bitmask()
        token = next((8 * index + (byte & -byte).bit_length() - 1 for index, byte in enumerate(allowed) if byte), None)
        if token is None or state.is_stopped() or not state.try_consume_tokens([token]):
            break
    return state.get_error() if state.is_error() else ""


@functools.cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def grammar_of(*, kind: str, value: Any, whitespace_pattern: str | None) -> str:
    """Write a grammar in llguidance's own notation.

    Args:
      kind: which field of `StructuredOutputsParams` gives it.
      value: that field: of "choice" a list of texts, of others a text.
      whitespace_pattern: as of `StructuredOutputsParams`.
    """
    match kind:
        case "json":
            schema = json.dumps(change_schemas(json.loads(value), _without_annotations))
            space = whitespace_pattern
            return llguidance.LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_flexible": False} if space is None else {"whitespace_pattern": space}
            )
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(value)
        case "choice":  # one terminal, which is one automaton; as rules, 2000 texts are too many
            terminal = " | ".join(json.dumps(text) for text in value)
            return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {terminal}")
        case _:
            return llguidance.LLMatcher.grammar_from_lark(value)


def after_reasoning(grammar: str, begin: str, end: str, marker_ids: Mapping[str, int]) -> str:
    """Let free text come before what a grammar describes.

    Args:
      grammar: a grammar of `grammar_of`.
      begin: the marker before the free text, which then may be missing; empty: the free text comes at once.
      end: the marker after it.
      marker_ids: those of both markers that are tokens of their own, which are no text.
    """
    inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    if (id_ := marker_ids.get(end)) is None:
        free = f"free[suffix={json.dumps(end)}]: /(?s:.*)/"
    else:
        free = f"free: /(?s:.*)/ <[{id_}]>"
    if begin:
        first = f"<[{marker_ids[begin]}]>" if begin in marker_ids else json.dumps(begin)
        start = f"start: reasoning? @answer\nreasoning: {first} free BLANKS?"
    else:
        start = "start: free BLANKS? @answer"
    outer = f"{start}\n{free}\nBLANKS: /\\s{{1,8}}/"
    return json.dumps({"grammars": [{"lark_grammar": outer}, inner | {"name": "answer"}]})


_FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""The formats of a JSON Schema that are enforced; others only describe a value, as all do in the standard."""


def _without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without a format that llguidance does not know, and would refuse."""
    if isinstance(name := schema.get("format"), str) and name not in _FORMATS:
        return {key: value for key, value in schema.items() if key != "format"}
    return schema


def plain(message: str) -> str:
    """Write an error of llguidance without what its users cannot use."""
    message = message.removesuffix("\n<non-verbose/>")
    message = message.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf instead")
    return "no text fits" if message == "NoExtensionBias" else message
