"""Prompts: texts, conversations and token ids, checked and as lists of token ids."""

from collections.abc import Sequence
from numbers import Number
from typing import Annotated, Any, Unpack, cast

import numpy as np
from msgspec import Meta

from jaxinfer.fields import check, shown
from jaxinfer.models.files.description import SentenceConfig
from jaxinfer.sandbox.templates import MAX_CHARACTERS, render
from jaxinfer.text.chat_template import ChatOptions, Messages, Renderer
from jaxinfer.text.tokenizer import Tokenizer, TruncationOptions

Prompt = str | list[int]
"""The input of a model: a text, or token ids."""

_TokenIds = Annotated[list[int], Meta(description="a text, or a list of token ids (integers)")]


def as_list[T](prompts: T | Sequence[T]) -> list[T]:
    """One prompt or several as a list; a list that begins with a number is one prompt. Lists are copied."""
    prompts = copied(prompts)
    if not isinstance(prompts, list) or (prompts and _is_number(prompts[0])):
        return [cast(T, prompts)]
    return [copied(prompt) for prompt in prompts]


def copied(prompts: Any) -> Any:
    """Copy lists and arrays to lists; return anything else as it is."""
    if hasattr(prompts, "__array__"):
        return np.asarray(prompts).tolist()
    others = str | bytes | bytearray | memoryview
    return list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, others) else prompts


def _is_number(value: object) -> bool:
    return isinstance(value, Number) or getattr(value, "shape", None) == ()


def encode_prompt(
    tokenizer: Tokenizer | None, prompt: Prompt, vocab: int, **cut: Unpack[TruncationOptions]
) -> list[int]:
    """Return a prompt's token ids, in a new list. cut: how a text is cut, as in `Tokenizer.encode`.

    Raises ValueError for an invalid prompt, text without a tokenizer, and ids outside [0, vocab).
    """
    if not isinstance(prompt, str):
        ids = check("The prompt", prompt, _TokenIds)
    elif tokenizer is None:
        raise ValueError("The model directory has no tokenizer: give the prompt as token ids.")
    else:
        ids = tokenizer.encode(prompt, **cut)
    if unknown := [i for i in ids if not 0 <= i < vocab]:
        raise ValueError(f"Token ids {shown(unknown[:5])} of the prompt are outside the vocabulary [0, {vocab}).")
    return ids


def check_length(tokenizer: Tokenizer | None, prompt: Prompt, context: int) -> None:
    """Raise ValueError for a text that is far longer than the context, which would take long to encode."""
    if not isinstance(prompt, str) or tokenizer is None:
        return
    if len(prompt) > MAX_CHARACTERS or tokenizer.exceeds(prompt, context):
        raise ValueError(
            f"The prompt has {len(prompt):,} characters, far more than the context of {context} tokens. Shorten the "
            "prompt or raise the context."
        )


def encode_to_embed(
    tokenizer: Tokenizer | None,
    text: str,
    sentence: SentenceConfig,
    *,
    vocab: int,
    context: int,
    prompt: str | None = None,
    truncate: bool = True,
) -> list[int]:
    """Encode a text to embed, after its prompt, cut to what the model takes.

    Args:
      sentence: how the model's texts become tokens.
      context: the most tokens of a request.
      prompt: as in `PoolingParams`.
      truncate: whether a longer text is cut; False: ValueError.

    Raises ValueError as `encode_prompt` does.
    """
    longest = min(sentence.max_seq_length or context, context)
    text = sentence.prompt(prompt) + text
    if truncate:
        return encode_prompt(tokenizer, text, vocab, max_tokens=longest, truncation_side=sentence.truncation_side)
    check_length(tokenizer, text, context)
    ids = encode_prompt(tokenizer, text, vocab)
    if len(ids) > longest:
        raise ValueError(
            f"The text has {len(ids)} tokens and the model takes {longest}; shorten it, or let it be cut, as it is by "
            "default."
        )
    return ids


def encode_chat(
    tokenizer: Tokenizer | None, messages: Messages, *, renderer: Renderer = render, **options: Unpack[ChatOptions]
) -> list[int]:
    """Encode a conversation as a prompt, by `Tokenizer.chat`. Raises ValueError without a tokenizer too."""
    return require_tokenizer(tokenizer).chat(messages, renderer=renderer, **options)


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer that a chat needs. Raises ValueError without one."""
    if tokenizer is None:
        raise ValueError("The model directory has no tokenizer, so it cannot chat.")
    return tokenizer
