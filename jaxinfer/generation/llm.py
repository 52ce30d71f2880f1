"""`LLM`: load a model directory and generate, in three lines."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.compiled import enable_persistent_cache
from jaxinfer.generation.beam import BeamOutput, BeamParams, beam_search
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.engine import Engine
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.request import RequestOutput
from jaxinfer.generation.request import Sequence as RunningSequence
from jaxinfer.generation.sampling import LogitsProcessor
from jaxinfer.generation.sizing import plan_memory
from jaxinfer.generation.text import Prompt, Tokenizer
from jaxinfer.models import DecoderConfig
from jaxinfer.models.adapters import AdapterInfo
from jaxinfer.models.loading import load_model
from sharding import MeshConfig, ShardingRules

Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A decoder-only model, ready to generate.

    Args:
      path: a model directory (`jaxinfer convert` makes one from Hugging Face files).
      mesh: how to split the model over devices: a MeshConfig, the path of a TOML file with a [mesh] table, a
        `jax.sharding.Mesh` with MeshConfig's axes, or None for the first device.
      dtype: "float32", "bfloat16" or "float16"; None: as stored, except that a CPU computes in float32.
      quantize: "int8" multiplies in int8 (weights per channel, activations per row); "int4" (per 128 inputs) and "fp8"
        (per channel) hold the weights alone so; None: as stored.
      rules: which dimension of weights and caches is split over which mesh axis; None: heads, MLP and vocabulary.
      max_batch: most sequences that run together.
      context: most tokens of a sequence, prompt and output; None: the model's own.
      cache_bytes: memory for keys and values; None: as `sizing.plan_memory` finds.
      adapters: LoRA adapters (PEFT folders) by the name that `SamplingParams.adapter` gives.
      processors: logits processors (`sampling.LogitsProcessor`) by the name that `SamplingParams.processors` gives.
      draft_tokens: most tokens that prompt lookup proposes at once; 0: no speculation.
      options: the other fields of `EngineConfig`: page_size, token_budget, max_decode_steps, prefix_caching, kv_dtype,
        max_adapters, max_lora_rank, adapter_bytes, overlap, kernels.

    Raises ValueError naming what is wrong and how to mend it, and MemoryError if the weights do not fit, both before
    any weight is read.

    >>> llm = LLM("examples/demo_model")  # doctest: +SKIP
    >>> llm.generate("import os\\n", SamplingParams(temperature=0))[0].completions[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mesh: Mesh | MeshConfig | str | Path | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        rules: ShardingRules | None = None,
        max_batch: int = 8,
        context: int | None = None,
        cache_bytes: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        processors: Mapping[str, LogitsProcessor] | None = None,
        draft_tokens: int = 0,
        **options: Any,
    ):
        if max_batch < 1:
            raise ValueError(f"LLM.max_batch must be >= 1, got {max_batch}.")
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := options.keys() - known:
            raise TypeError(f"LLM has no option {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}.")
        enable_persistent_cache()
        self.model = load_model(path, mesh=mesh, rules=rules, dtype=dtype, quantize=quantize)
        model = self.model.config
        if not isinstance(model, DecoderConfig):
            raise ValueError(f"{path} holds an encoder; use jaxinfer.Embedder for it.")
        if context is not None and not 1 < context <= model.context:
            raise ValueError(f"LLM.context must be in [2, {model.context}] for this model, got {context}.")
        if adapters:
            options.setdefault("max_adapters", min(len(adapters), 8))
            options.setdefault("max_lora_rank", max(AdapterInfo.read(folder).rank for folder in adapters.values()))
            if not options["max_adapters"]:
                raise ValueError("LLM.max_adapters is 0, but there are adapters: give it at least 1, or none of them.")
        if jax.default_backend() != "cpu":
            options.setdefault("padding", 4.0)  # every step there takes as long as reading the weights
        config = EngineConfig(slots=max_batch, context=context or model.context, draft_tokens=draft_tokens, **options)
        self.tokenizer = Tokenizer.of(self.model.folder)
        self.memory = plan_memory(self.model, config, cache_bytes=cache_bytes)
        self.engine = Engine(self.model, self.tokenizer, config, num_pages=self.memory.num_pages, processors=processors)
        for name, folder in (adapters or {}).items():
            assert self.engine.adapters is not None
            self.engine.adapters.register(name, folder)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params | None = None) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        Args:
          prompts: one or several prompts, each a text or a list of token ids.
          params: one SamplingParams for all, or one each.
        Raises ValueError for an invalid prompt, naming it, before anything runs.
        """
        requests = self._prepare(prompts, params)
        for _ in self.engine.run(requests):
            pass
        return [self.engine.output(sequences) for sequences in requests]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None = None, *, max_steps: int = 4
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output, as far as it has come, each time it grows.

        `max_steps` bounds the tokens between two yields. Closing the iterator gives the requests up.
        """
        requests = self._prepare(prompts, params)
        by_id = {sequences[0].request_id: sequences for sequences in requests}
        for advanced in self.engine.run(requests, max_steps):
            for request_id in dict.fromkeys(s.request_id for s in advanced):
                yield self.engine.output(by_id[request_id])

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamParams | None = None) -> list[BeamOutput]:
        """The likeliest continuations of every prompt that beam search finds; results in the order of the prompts.

        Raises ValueError for an invalid prompt, naming it, before anything runs.
        """
        return beam_search(self.engine, _as_list(prompts), params or BeamParams())

    def embed(self, texts: Prompt | Sequence[Prompt], *, adapter: str | None = None) -> np.ndarray:
        """The mean of the last hidden vectors of every text, of length 1: float32 [texts, D].

        Raises ValueError for an invalid text, naming it, before anything runs.
        """
        return self.engine.embed(_as_list(texts), adapter=adapter)

    def chat(self, messages: list[dict], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation ({"role", "content"} messages) through the model's chat template."""
        if self.tokenizer is None:
            raise ValueError("The model directory has no tokenizer, so it cannot chat.")
        return self.generate([self.tokenizer.chat(messages)], params)[0]

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise the ValueError that `generate` would raise for this prompt, if any."""
        self.engine.prepare(prompt, params)

    def _prepare(self, prompts: Prompt | Sequence[Prompt], params: Params | None) -> list[list[RunningSequence]]:
        batch = _as_list(prompts)
        given = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(given) != len(batch):
            raise ValueError(f"{len(batch)} prompts but {len(given)} SamplingParams: give one for all, or one each.")
        requests = []
        for index, (prompt, options) in enumerate(zip(batch, given, strict=True)):
            try:
                requests.append(self.engine.prepare(prompt, options))
            except ValueError as error:
                raise ValueError(f"Prompt {index}: {error}") from error
        return requests


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and all(isinstance(p, int) for p in prompts)):
        return [prompts]  # type: ignore[list-item]  # one prompt: a text or a list of ids
    return list(prompts)  # type: ignore[arg-type]
