"""The parts of a model's answer: reasoning, content and tool calls, told apart while the text grows.

A parser is a state machine that is fed with pieces of text. However the text is divided into pieces, the parts are the
same. What is not a valid call is content.
"""

from jaxinfer.text.parsing.families import TAIL_TOKENS, AnswerFormat
from jaxinfer.text.parsing.parser import AnswerParser, Part, TextPart, ToolCall

__all__ = ["TAIL_TOKENS", "AnswerFormat", "AnswerParser", "Part", "TextPart", "ToolCall"]
