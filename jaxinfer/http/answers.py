"""The answers of completions and chats, whole and in chunks, as the OpenAI API writes them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxinfer.generation.engine.view import CompletionSnapshot, RequestSnapshot
from jaxinfer.generation.outputs import TokenLogprob
from jaxinfer.text import Tokenizer

Token = tuple[str, list[int]]
"""A token's text, and its bytes."""


class TokenDetails(msgspec.Struct, kw_only=True):
    """How many of the prompt's tokens were in the prefix cache."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """How many tokens were reasoning; how many suggested tokens were right, and how many were not."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """The tokens of a request, over all its prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: OutputDetails


def usage_of(snapshots: Iterable[RequestSnapshot], reasoning_tokens: int = 0) -> Usage:
    """The usage of a request, of the newest snapshot of each prompt."""
    prompt = cached = 0
    completions = list[CompletionSnapshot]()
    tokens = 0
    for snapshot in snapshots:
        size = len(snapshot.prompt_token_ids)
        prompt += size
        cached += min(completion.num_cached_tokens or 0 for completion in snapshot.completions)
        completions += snapshot.completions
        tokens += sum(completion.num_tokens - size for completion in snapshot.completions)
    accepted = sum(completion.num_accepted_tokens for completion in completions)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=tokens,
        total_tokens=prompt + tokens,
        prompt_tokens_details=TokenDetails(cached_tokens=cached),
        completion_tokens_details=OutputDetails(
            reasoning_tokens=reasoning_tokens,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=sum(completion.num_draft_tokens for completion in completions) - accepted,
        ),
    )


class CalledFunction(msgspec.Struct):
    """The function of a call. arguments: a JSON object, as text."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call of a function. index: its place among those of the message; only in a delta."""

    index: int | UnsetType = UNSET
    id: str
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of a chat, or what of it is new. Reasoning has two names: clients know one or the other."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct):
    """A completion, or what of it is new: a text in `/v1/completions`, else a message, or a chat's delta."""

    index: int
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None
    text: str | UnsetType = UNSET
    message: Message | UnsetType = UNSET
    delta: Message | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer to a completion or a chat, whole or a chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class LogprobForms:
    """Log probabilities in the two forms of the API."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(list(tokens))

    def _text(self, token: int) -> str:
        text = None if self._tokenizer is None else self._tokenizer.text_of(token)
        return f"token_id:{token}" if text is None else text

    def of_completion(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None], offset: int
    ) -> dict[str, Any]:
        """The form of `/v1/completions`. offset: characters of the text before the first of these tokens."""
        texts = [self._text(token) for token in tokens]
        offsets = [offset]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [entry and _finite(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": offsets[: len(texts)],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens by their texts; parts of characters have equal ones, so later ones go by their ids."""
        top: dict[str, float] = {}
        for token, logprob in entry.top.items():
            text = self._text(token)
            top[f"token_id:{token}" if text in top else text] = _finite(logprob)
        return top

    def of_chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The form of `/v1/chat/completions`."""
        return {
            "content": [
                self._entry(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._entry(token, value) for token, value in entry.top.items()]}
                for entry in entries
            ]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    """A number that JSON has: -9999 in place of -inf, as OpenAI writes it."""
    return logprob if math.isfinite(logprob) else -9999.0
