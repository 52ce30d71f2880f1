"""The formats of answers, by the markers that a model's chat template has."""

import re
from typing import NamedTuple, Self

from jaxinfer.fields import shown
from jaxinfer.text.parsing.calls import SYNTAXES
from jaxinfer.text.parsing.harmony import MESSAGE, HarmonyParser
from jaxinfer.text.parsing.parser import AnswerParser, CallSyntax, MarkerParser, ReasoningTags, Schemas
from jaxinfer.text.tokenizer import Tokenizer

HARMONY = "openai"
"""The format of GPT-OSS, for calls and reasoning, by vLLM's name."""

TAIL_TOKENS = 16
"""Tokens at the end of a prompt that show whether it ends within reasoning."""

REASONING = {"think": ReasoningTags("<think>", "</think>"), "mistral": ReasoningTags("[THINK]", "[/THINK]")}
"""The markers of reasoning, by name."""

TOOL_CALL_PARSERS = (*SYNTAXES, HARMONY)
REASONING_PARSERS = (*REASONING, HARMONY)

_CALL_MARKERS = (
    ("<|channel|>", HARMONY),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("python_tag", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
)
_SWITCHES = {
    "reasoning_effort": re.compile("reasoning_effort"),
    "enable_thinking": re.compile("enable_thinking"),
    "thinking": re.compile(r"\{%-?\s*(?:el)?if (?:not )?thinking\b"),
}
_TEXT_ARGUMENTS = re.compile(r"[+~]\s*[\w.'\"\[\]]*\barguments['\"\]]*\s*(?:[+~}]|-\})")
"""Arguments that a template joins with texts, which it can only if they are a text."""
_REASONING_MARKERS = (("<|channel|>", HARMONY), ("</think>", "think"), ("[THINK]", "mistral"))


def check_parsers(calls: str | None, reasoning: str | None) -> None:
    """Raise ValueError for an unknown name of a parser."""
    for option, name, known in (
        ("tool_call_parser", calls, TOOL_CALL_PARSERS),
        ("reasoning_parser", reasoning, REASONING_PARSERS),
    ):
        if name is not None and name not in known:
            raise ValueError(f"{option}={shown(name)} is unknown; known: {', '.join(known)}.")


class AnswerFormat(NamedTuple):
    """How a model writes calls and reasoning: names in TOOL_CALL_PARSERS and REASONING_PARSERS.

    Attributes:
      calls: how it writes calls.
      reasoning: how it writes reasoning; None: it does not reason.
      knows_tools: whether its chat template tells it of tools.
      switches: the arguments by which its chat template turns reasoning on, off, or up.
      text_arguments: whether its chat template takes the arguments of calls as JSON texts, and not as objects.
    """

    calls: str
    reasoning: str | None
    knows_tools: bool = True
    switches: tuple[str, ...] = ()
    text_arguments: bool = False

    @classmethod
    def of_template(cls, text: str, *, calls: str | None = None, reasoning: str | None = None) -> Self:
        """Find the format in the text of a chat template; `calls` and `reasoning` are known better."""
        calls = calls or next((name for marker, name in _CALL_MARKERS if marker in text), "json")
        reasoning = reasoning or next((name for marker, name in _REASONING_MARKERS if marker in text), None)
        switches = tuple(switch for switch, pattern in _SWITCHES.items() if pattern.search(text))
        text_arguments = _TEXT_ARGUMENTS.search(text) is not None
        return cls(calls, reasoning, "tools" in text, switches, text_arguments)

    @property
    def tags(self) -> ReasoningTags | None:
        """The markers around reasoning; None: it has none, or channels."""
        return REASONING.get(self.reasoning or "")

    @property
    def has_channels(self) -> bool:
        """Whether the model writes reasoning, content and calls in channels, as GPT-OSS does."""
        return HARMONY in (self.calls, self.reasoning)

    def has_special_markers(self, tokenizer: Tokenizer) -> bool:
        """Check whether a marker is a special token, which the text of an answer must then not leave out."""
        return any(tokenizer.special_id(marker) is not None for marker in self._markers)

    @property
    def _markers(self) -> tuple[str, ...]:
        syntax = SYNTAXES.get(self.calls)
        calls = () if syntax is None else (syntax.begin, syntax.end, *syntax.ignored, *syntax.others)
        harmony = (MESSAGE,) if self.has_channels else ()
        return tuple(marker for marker in (*calls, *(self.tags or ()), *harmony) if marker)

    def opens_reasoning(self, prompt: str) -> bool:
        """Check whether a prompt ends within reasoning."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags.begin)

    def parser(
        self, schemas: Schemas | None = None, *, opened: bool = False, forced: CallSyntax | None = None
    ) -> AnswerParser:
        """Make the parser of an answer.

        Args:
          schemas: the parameters of the functions that the model may call; None: calls are content.
          opened: whether the prompt ends within reasoning.
          forced: how a grammar has the model write calls, instead of its own way.
        """
        if forced is not None:
            return MarkerParser(self.tags, forced, schemas, opened=opened)
        if self.has_channels:
            return HarmonyParser(calls=schemas is not None)
        calls = None if schemas is None else SYNTAXES[self.calls]
        return MarkerParser(self.tags, calls, schemas, opened=opened)
