"""`LLM`: load a model directory and generate, in three lines."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from jaxinfer.fields import AtLeast1, check
from jaxinfer.generation.api.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from jaxinfer.generation.api.build import ModelOptions
from jaxinfer.generation.api.embedding import embed
from jaxinfer.generation.api.holder import EngineHolder
from jaxinfer.generation.api.loading import load_decoder
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.engine.view import RequestView
from jaxinfer.generation.execution.memory import MemoryPlan
from jaxinfer.generation.foreign_options import MODEL, refuses
from jaxinfer.generation.outputs import RequestOutput
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.sampling.sampler import LogitsProcessor
from jaxinfer.models.devices import AnyMesh
from jaxinfer.progress import ProgressOption, long_work, showing
from jaxinfer.sharding import ShardingRules
from jaxinfer.text import Prompt, as_list, encode_chat
from jaxinfer.text.chat_template import ChatOptions, Messages

Params = SamplingParams | Sequence[SamplingParams]


@refuses(MODEL)
class LLM(EngineHolder):
    """A decoder-only model, ready to generate.

    Args:
      path: a model directory, as `jaxinfer convert` makes it; or a Hugging Face directory, a GGUF file, or a repository
        of the hub (ORG/NAME, ORG/NAME@REVISION, or ORG/NAME:Q4_K_M for one of its GGUF files), which is converted into
        the cache folder when it is first given.
      mesh: how to split the model over devices: a MeshConfig, the path of a TOML file with a table [mesh], perhaps
        [rules], and perhaps [memory] with `MemoryOptions`, a `jax.sharding.Mesh` with MeshConfig's axes, or None for
        the first device.
      dtype: "float32", "bfloat16" or "float16"; None: as stored, except that a CPU computes in float32.
      quantize: "int8" multiplies in int8 (weights per channel, activations per row); "int4" (per 128 inputs) and "fp8"
        (per channel) quantise the weights alone; None: as stored.
      rules: which dimension of weights and caches is split over which mesh axis; None: heads, MLP and vocabulary.
      max_batch: how many sequences can run at once.
      context: how many tokens a sequence can have, prompt and output; None: the model's own.
      cache_bytes: memory for keys and values; None: as `memory.plan_memory` decides.
      adapters: LoRA adapters (PEFT folders) by the name that `SamplingParams.adapter` gives.
      logits_processors: `sampler.LogitsProcessor`s by the name that `SamplingParams.logits_processors` gives.
      progress: whether work of seconds, such as compiling, shows a line on stderr: True, False, a function to call with
        (what, done, total) in its place, or None: unless `JAXINFER_PROGRESS=0` is in the environment.
      options: those of `EngineOptions`, such as page_size and num_speculative_tokens, and of `MemoryOptions`, such as
        weights and device_memory.

    Raises ValueError naming what is wrong and how to fix it, and MemoryError if the weights do not fit, both before
    any weight is read.

    >>> llm = LLM("examples/demo_model")  # doctest: +SKIP
    >>> llm.generate("import os\\n", SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mesh: AnyMesh = None,
        dtype: str | None = None,
        quantize: str | None = None,
        rules: ShardingRules | None = None,
        max_batch: int = 8,
        context: int | None = None,
        cache_bytes: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        progress: ProgressOption = None,
        **options: Unpack[ModelOptions],
    ):
        with showing(progress), long_work(f"loading {path}"):
            loaded = load_decoder(
                path,
                mesh=mesh,
                dtype=dtype,
                quantize=quantize,
                rules=rules,
                max_batch=max_batch,
                context=context,
                cache_bytes=cache_bytes,
                adapters=adapters,
                logits_processors=logits_processors,
                **options,
            )
        super().__init__(loaded)

    @property
    def memory(self) -> MemoryPlan:
        """The planned division of device memory."""
        memory = super().memory
        assert memory is not None, "a decoder has a cache"
        return memory

    def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Request:
        """Tokenise and check a prompt once. Pass the request to `generate` or `stream` instead of the prompt.

        Args:
          prompt: the prompt.
          sampling_params: how to continue it; None: as in `SamplingParams.from_model`.
          request_id: your own name for the request, which its outputs have; None: a new one.

        Raises the ValueError that `generate` would raise for this prompt.
        """
        return self.engine.prepare(prompt, sampling_params, request_id=request_id)

    def generate(
        self, prompts: Prompt | Request | Sequence[Prompt | Request], sampling_params: Params | None = None
    ) -> list[RequestOutput]:
        """Generate a continuation of each prompt. Results are in the order of the prompts.

        Args:
          prompts: one or several prompts, each a text, a list of token ids, or a request from `prepare`.
          sampling_params: one for all, or one each; None: as in `SamplingParams.from_model`. Requests have theirs.

        Raises ValueError for an invalid prompt, naming it, before anything runs.
        """
        with self._call():
            engine = self.engine
            groups = [request.sequences() for request in self._prepare(prompts, sampling_params)]
            for _ in engine.run(groups):
                pass
        return [RequestView(sequences).output() for sequences in groups]

    def stream(
        self,
        prompts: Prompt | Request | Sequence[Prompt | Request],
        sampling_params: Params | None = None,
        *,
        max_passes: int = 4,
    ) -> Generator[RequestOutput]:
        """Generate like `generate`, and yield a request's output so far each time it grows.

        `max_passes` bounds the passes through the model, and so the tokens, between two yields. Closing the iterator
        gives the requests up.

        The output so far is copied each time. In long texts, `OutputStream.deltas` of an `AsyncLLM` is faster.
        """
        max_passes = check("max_passes", max_passes, AtLeast1)
        groups = {r.request_id: r.sequences() for r in self._prepare(prompts, sampling_params)}
        views = {request_id: RequestView(sequences) for request_id, sequences in groups.items()}
        for advanced in self.engine.run(list(groups.values()), max_passes):
            for request_id in dict.fromkeys(s.request_id for s in advanced):
                yield views[request_id].output()

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of each prompt. Results are in the order of the prompts.

        Raises ValueError for an invalid prompt, naming it, before anything runs.
        """
        with self._call():
            return beam_search(self.engine, as_list(prompts), BeamSearchParams() if params is None else params)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: str | None = None,
        prompt: str | None = None,
        truncate: bool = True,
    ) -> np.ndarray:
        """Embed texts as `Embedder.embed` does: float32 [texts, D].

        Args:
          texts: one or several texts or lists of token ids.
          adapter: as in `Embedder.embed`.
          prompt: as in `Embedder.embed`.
          truncate: as in `Embedder.embed`.

        Raises ValueError for an invalid text, naming it, before anything runs.
        """
        with self._call():
            return embed(
                self.engine,
                texts,
                size=self.model.transformer.output_width,
                adapter=adapter,
                prompt=prompt,
                truncate=truncate,
            )

    def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> RequestOutput:
        """Generate the next message of a conversation ({"role", "content"} messages) by the chat template.

        Args:
          messages: the conversation.
          sampling_params: how to continue it; None: as in `SamplingParams.from_model` with `chat=True`.
          options: `ChatOptions`: tools, documents, chat_template, chat_template_kwargs, add_generation_prompt,
            continue_final_message.

        Raises ValueError for a conversation or options that the template cannot take.
        """
        params = SamplingParams.from_model(self, chat=True) if sampling_params is None else sampling_params
        return self.generate([encode_chat(self.tokenizer, messages, **options)], params)[0]

    def _prepare(self, prompts: Prompt | Request | Sequence[Prompt | Request], params: Params | None) -> list[Request]:
        batch = as_list(prompts)
        if params is not None and any(isinstance(prompt, Request) for prompt in batch):
            raise ValueError("A prepared request already has SamplingParams: do not pass others with it.")
        given = list(params) if isinstance(params, Sequence) else [params] * len(batch)
        if len(given) != len(batch):
            raise ValueError(f"{len(batch)} prompts but {len(given)} SamplingParams: pass one, or one per prompt.")
        requests = []
        for index, (prompt, options) in enumerate(zip(batch, given, strict=True)):
            try:
                requests.append(self.engine.prepare(prompt, None if isinstance(prompt, Request) else options))
            except ValueError as error:
                raise ValueError(f"Prompt {index}: {error}") from error
        if len({request.request_id for request in requests}) < len(requests):
            raise ValueError(
                "A prepared request or a request_id is passed twice: prepare the prompt again for each run."
            )
        return requests
