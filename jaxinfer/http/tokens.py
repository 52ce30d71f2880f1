"""`/tokenize` and `/detokenize`, as vLLM has them."""

import asyncio
from typing import Any

import msgspec

from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.http.bodies import Body, text_alone
from jaxinfer.http.errors import BadRequestError
from jaxinfer.text import Tokenizer


class TokenizeBody(Body, kw_only=True):
    """The body of `/tokenize`: a prompt, or the messages of a chat."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body, kw_only=True):
    """The body of `/detokenize`."""

    model: str = ""
    tokens: list[int]


class Tokens(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


async def tokenize(llm: AsyncLLM, body: TokenizeBody) -> Tokens:
    """Encode a prompt or a chat. Raises BadRequestError unless the body has one of them, ValueError."""
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("give prompt or messages, one of them.", param="prompt")
    tokenizer = _tokenizer(llm)
    if body.messages is not None:
        options: Any = {"add_generation_prompt": body.add_generation_prompt}
        if body.chat_template_kwargs is not None:
            options["chat_template_kwargs"] = body.chat_template_kwargs
        tokens = await llm.encode_chat(text_alone(body.messages), **options)
    else:
        assert body.prompt is not None
        encode = tokenizer.encode if body.add_special_tokens else tokenizer.encode_word
        tokens = await asyncio.to_thread(encode, body.prompt)
    strings = None
    if body.return_token_strs:
        strings = await asyncio.to_thread(lambda: [tokenizer.text_of(token) for token in tokens])
    return Tokens(count=len(tokens), max_model_len=llm.engine.config.context, tokens=tokens, token_strs=strings)


async def detokenize(llm: AsyncLLM, body: DetokenizeBody) -> dict[str, str]:
    """Decode tokens. Raises BadRequestError for ids that the model does not have."""
    vocab = llm.model.transformer.vocab
    if wrong := [token for token in body.tokens if not 0 <= token < vocab]:
        raise BadRequestError(f"tokens must be in [0, {vocab}), got {wrong[0]}.", param="tokens")
    decode = _tokenizer(llm).decode
    return {"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)}


def _tokenizer(llm: AsyncLLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise BadRequestError("the model directory has no tokenizer.")
    return llm.tokenizer
