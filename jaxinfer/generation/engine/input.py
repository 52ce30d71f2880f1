"""Turns a caller's input into a checked `Request`: tokens, options, a compiled grammar."""

import dataclasses
import itertools
import secrets
import threading
from collections.abc import Collection
from typing import Annotated

import numpy as np
from msgspec import Meta

from jaxinfer.fields import check, shown
from jaxinfer.generation.engine.pooler import Pooler
from jaxinfer.generation.engine.request import Request, special_stops
from jaxinfer.generation.lora.cache import AdapterCache
from jaxinfer.generation.params import MAX_BAD_WORD_TOKENS, MAX_STOP_TOKEN_IDS, PoolingParams, SamplingParams
from jaxinfer.generation.sampling.bitmasks import bitmask_of
from jaxinfer.generation.sampling.structured_outputs import GrammarCompiler
from jaxinfer.models.files.description import SentenceConfig
from jaxinfer.text import Prompt, Tokenizer, check_length, encode_prompt, encode_to_embed

_RequestId = Annotated[str, Meta(min_length=1, description="a non-empty string")]


class InputProcessor:
    """Makes requests for one engine, in any thread.

    Args:
      vocab: how many tokens the model has.
      eos_ids: the tokens that end its texts.
      context: how many tokens a sequence can have.
      tokenizer: the model's tokenizer, or None for token ids only.
      generates: whether the model can generate, or only embed.
      defaults: the params of prompts without; None: the neutral ones.
      logits_processors: the names that requests can give.
      adapters: the adapters that requests can name, or None.
      sentence: how texts to embed become tokens; None: the model's directory does not say.
      pooler: as in `Request`.
    """

    def __init__(
        self,
        *,
        vocab: int,
        eos_ids: tuple[int, ...],
        context: int,
        tokenizer: Tokenizer | None,
        generates: bool,
        defaults: SamplingParams | None = None,
        logits_processors: Collection[str] = (),
        adapters: AdapterCache | None = None,
        sentence: SentenceConfig | None = None,
        pooler: Pooler | None = None,
    ):
        self._sentence, self._pooler = sentence, pooler
        self.tokenizer, self.adapters = tokenizer, adapters
        self._vocab, self._eos_ids, self._context, self._generates = vocab, eos_ids, context, generates
        self._defaults = SamplingParams() if defaults is None else defaults
        self._logits_processors = logits_processors
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()
        self._ids = map(f"{secrets.token_hex(4)}-{{}}".format, itertools.count())  # no caller thinks of such a name
        self._identity = object()

    def process(
        self, prompt: Prompt, params: SamplingParams | PoolingParams | None = None, request_id: str | None = None
    ) -> Request:
        """Make a request for one prompt, still without its grammar.

        Args:
          params: the prompt's params; None: the model's defaults.
          request_id: the caller's own name for it; None: a new one.

        Raises ValueError for an invalid prompt or params, an empty prompt, unknown token ids, text without a
        tokenizer, an unknown adapter or logits processor, or sampling from a model that can only embed.
        """
        params = self._defaults if params is None else params
        if not isinstance(params, SamplingParams | PoolingParams):
            raise ValueError(f"sampling_params must be SamplingParams or PoolingParams, got {shown(params)}.")
        if isinstance(params, PoolingParams):
            token_ids = self._encode_to_embed(prompt, params)
        else:
            check_length(self.tokenizer, prompt, self._context)
            token_ids = encode_prompt(self.tokenizer, prompt, self._vocab)
        if not token_ids:
            raise ValueError("The prompt is empty: give at least one token.")
        self._check_adapter(params)
        common = {
            "request_id": next(self._ids) if request_id is None else check("request_id", request_id, _RequestId),
            "prepared_by": self._identity,
            "prompt": prompt if isinstance(prompt, str) else None,
            "prompt_token_ids": tuple(token_ids),
        }
        if isinstance(params, PoolingParams):
            return Request(**common, params=params, max_length=len(token_ids), pooler=self._pooler)
        if not self._generates:
            raise ValueError("This model can only embed: it is an encoder, or a decoder without a head.")
        self._check_sampling(params)
        words = self._bad_words(params)
        length = self._context if params.max_tokens is None else len(token_ids) + params.max_tokens
        return Request(
            **common,
            params=params,
            max_length=min(self._context, length),
            stop_token_ids=self._stop_token_ids(params),
            eos_ids=() if params.ignore_eos else self._eos_ids,
            bitmask=self._bitmask(params, {word[0] for word in words if len(word) == 1}),
            bad_words=tuple(word for word in words if len(word) > 1),
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            tokenizer=self.tokenizer,
        )

    def _encode_to_embed(self, text: Prompt, params: PoolingParams) -> list[int]:
        """Encode a text by `encode_to_embed`; token ids stay as they are."""
        if self._sentence is None:
            raise ValueError(
                "An older version of jaxinfer converted this model, without how it embeds; convert the model again."
            )
        if not isinstance(text, str):
            if params.prompt is not None:
                raise ValueError(f"PoolingParams.prompt={shown(params.prompt)} needs a text; got token ids.")
            return encode_prompt(self.tokenizer, text, self._vocab)
        return encode_to_embed(
            self.tokenizer,
            text,
            self._sentence,
            vocab=self._vocab,
            context=self._context,
            prompt=params.prompt,
            truncate=params.truncate,
        )

    def check_own(self, request: Request) -> None:
        """Raise ValueError for a request that another engine has prepared."""
        if request.prepared_by is not self._identity:
            raise ValueError(
                "Another model has prepared this request: prepare the prompt with the one that is to run it."
            )

    def with_grammar(self, request: Request) -> Request:
        """Add the compiled grammar that the request asks for. That may take seconds, so check all else before.

        Raises ValueError for a grammar that does not compile.
        """
        if request.pooling or request.sampling.structured_outputs is None:
            return request
        with self._grammars_lock:  # made once only: it takes seconds for a large vocabulary
            if self._grammars is None:
                assert self.tokenizer is not None, "`process` has refused this request"
                self._grammars = GrammarCompiler(self.tokenizer.to_json(), vocab=self._vocab, eos_ids=self._eos_ids)
        return dataclasses.replace(request, matcher=self._grammars.matcher(request.sampling.structured_outputs))

    def _check_sampling(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if unknown := [i for i in getattr(params, name) or () if not 0 <= i < self._vocab]:
                raise ValueError(
                    f"SamplingParams.{name} holds {unknown[:5]}, outside the vocabulary [0, {self._vocab})."
                )
        if params.stop and self.tokenizer is None:
            raise ValueError(
                "SamplingParams.stop needs a tokenizer, and the model directory has none: use stop_token_ids."
            )
        for name in ("structured_outputs", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"SamplingParams.{name} needs a tokenizer, and the model directory has none.")
        if unknown := [name for name in params.logits_processors if name not in self._logits_processors]:
            known = ", ".join(self._logits_processors) or "none"
            raise ValueError(
                f"SamplingParams.logits_processors holds {unknown}, unknown to this engine; known: {known}."
            )

    def _bad_words(self, params: SamplingParams) -> set[tuple[int, ...]]:
        """The tokens of each bad word, alone and after a space; words that the model cannot write are left out.

        After a space it is another word only if its first token is another and it has as many, as in vLLM.
        """
        words: set[tuple[int, ...]] = set()
        for word in params.bad_words:
            assert self.tokenizer is not None, "`_check_sampling` has refused this request"
            stem = word.lstrip() or word
            alone, spaced = (tuple(self.tokenizer.encode_word(text)) for text in (stem, f" {stem}"))
            words.add(alone)
            if len(spaced) == len(alone) and spaced[:1] != alone[:1]:
                words.add(spaced)
        words = {word for word in words if word and max(word) < self._vocab}
        if (count := sum(len(word) for word in words if len(word) > 1)) > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"SamplingParams.bad_words of several tokens have {count} tokens, at most {MAX_BAD_WORD_TOKENS}: give "
                "fewer words."
            )
        return words

    def _bitmask(self, params: SamplingParams, banned: set[int]) -> np.ndarray | None:
        """The bitmask of the allowed tokens without the banned ones; None if that is all tokens."""
        if params.allowed_token_ids is None and not banned:
            return None
        allowed = range(self._vocab) if params.allowed_token_ids is None else params.allowed_token_ids
        if not (left := set(allowed) - banned):
            raise ValueError("SamplingParams.bad_words leave none of the tokens that may be chosen.")
        return bitmask_of(left, self._vocab)

    def _check_adapter(self, params: SamplingParams | PoolingParams) -> None:
        if params.adapter is None:
            return
        if self.adapters is None:
            raise ValueError(
                f"{type(params).__name__}.adapter is {params.adapter!r}, but the engine has no room for adapters: give "
                "LLM its adapters, or EngineConfig.max_adapters."
            )
        self.adapters.check(params.adapter)

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        strings = (id_ for id_ in special_stops(params, self.tokenizer) if id_ < self._vocab)
        ids = tuple(dict.fromkeys((*params.stop_token_ids, *strings, *(() if params.ignore_eos else self._eos_ids))))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids, special tokens in stop and the model's end-of-text ids are {len(ids)}, at most "
                f"{MAX_STOP_TOKEN_IDS}."
            )
        return ids
