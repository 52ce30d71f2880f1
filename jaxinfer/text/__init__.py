"""Text and token ids: tokenizers, chat templates, prompts, and text that grows by tokens."""

from jaxinfer.text.prompts import (
    Prompt,
    as_list,
    check_length,
    copied,
    encode_chat,
    encode_prompt,
    encode_to_embed,
    require_tokenizer,
)
from jaxinfer.text.stream import TextStream
from jaxinfer.text.tokenizer import Tokenizer

__all__ = [
    "Prompt",
    "TextStream",
    "Tokenizer",
    "as_list",
    "check_length",
    "copied",
    "encode_chat",
    "encode_prompt",
    "encode_to_embed",
    "require_tokenizer",
]
