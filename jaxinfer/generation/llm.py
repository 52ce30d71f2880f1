"""`LLM`: load a model directory and generate, in three lines."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from jax.sharding import Mesh

from jaxinfer.compiled import enable_persistent_cache
from jaxinfer.generation.engine import Engine
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.request import RequestOutput
from jaxinfer.generation.request import Sequence as RunningSequence
from jaxinfer.generation.text import Prompt, Tokenizer
from jaxinfer.models import DecoderConfig
from jaxinfer.models.config import kv_bytes_per_token
from jaxinfer.models.loading import LoadedModel, available_bytes, load_model
from sharding import MeshConfig, ShardingRules

Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A decoder-only model, ready to generate.

    Args:
      path: a model directory (`jaxinfer convert` makes one from Hugging Face files).
      mesh: how to split the model over devices: a MeshConfig, the path of a TOML file with a [mesh] table, a
        `jax.sharding.Mesh` with MeshConfig's axes, or None for the first device.
      dtype: "float32", "bfloat16" or "float16"; None: as stored, except that a CPU computes in float32.
      quantize: "int8" multiplies in int8 (weights per channel, activations per row); None: as stored.
      rules: which dimension of weights and caches is split over which mesh axis; None: heads, MLP and vocabulary.
      max_batch: most sequences that run together.
      context: most tokens of a sequence, prompt and output; None: the model's own.
      cache_bytes: memory for keys and values; None: what `max_batch` full sequences need, or half of what is free.
      page_size: tokens in a page of the cache.

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
        page_size: int = 16,
    ):
        for name, value in (("max_batch", max_batch), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"LLM.{name} must be >= 1, got {value}.")
        enable_persistent_cache()
        self.model = load_model(path, mesh=mesh, rules=rules, dtype=dtype, quantize=quantize)
        config = self.model.config
        if not isinstance(config, DecoderConfig):
            raise ValueError(f"{path} holds an encoder; use jaxinfer.Embedder for it.")
        if context is not None and not 1 < context <= config.context:
            raise ValueError(f"LLM.context must be in [2, {config.context}] for this model, got {context}.")
        context = context or config.context
        self.tokenizer = Tokenizer.of(self.model.folder)
        self.engine = Engine(
            self.model,
            self.tokenizer,
            slots=max_batch,
            context=context,
            num_pages=_page_count(self.model, config, max_batch, context, cache_bytes, page_size),
            page_size=page_size,
        )

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params | None = None) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        Args:
          prompts: one or several prompts, each a text or a list of token ids.
          params: one SamplingParams for all, or one each.
        Raises ValueError for an invalid prompt, naming it, before anything runs.
        """
        requests = self._prepare(prompts, params)
        for _ in self._run(requests, None):
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
        for advanced in self._run(requests, max_steps):
            for request_id in dict.fromkeys(s.request_id for s in advanced):
                yield self.engine.output(by_id[request_id])

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

    def _run(self, requests: list[list[RunningSequence]], max_steps: int | None) -> Iterator[list[RunningSequence]]:
        sequences = [s for request in requests for s in request]
        if sequences:
            self.engine.runner.compile_ahead(sequences)
        try:
            for request in requests:
                self.engine.add(request)
            while not all(s.finished for s in sequences):
                yield self.engine.step(max_steps)
        finally:
            for request in requests:
                self.engine.abort(request[0].request_id)
            self.engine.runner.save_costs()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and all(isinstance(p, int) for p in prompts)):
        return [prompts]  # type: ignore[list-item]  # one prompt: a text or a list of ids
    return list(prompts)  # type: ignore[arg-type]


def _page_count(
    model: LoadedModel, config: DecoderConfig, max_batch: int, context: int, cache_bytes: int | None, page_size: int
) -> int:
    """Pages for `max_batch` full sequences, or fewer if the memory does not allow that many."""
    full = max_batch * -(-context // page_size)
    page_bytes = page_size * kv_bytes_per_token(config, model.weights.dtype.itemsize)
    budget = available_bytes(model.mesh) // 2 if cache_bytes is None else cache_bytes
    if budget < page_bytes:
        raise ValueError(
            f"The KV cache may take {budget} bytes, but one page of {page_size} tokens takes {page_bytes}: "
            "raise cache_bytes, or lower page_size."
        )
    return min(full, budget // page_bytes)
