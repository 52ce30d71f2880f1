"""The engine: requests in, tokens out, one step at a time."""

import itertools
import logging
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np
from rich.filesize import decimal

from jaxinfer.generation.adapters import AdapterSlots
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.drafting import DraftControl
from jaxinfer.generation.encoders import EncoderRunner, EncoderScheduler
from jaxinfer.generation.pages import PagePool
from jaxinfer.generation.params import MAX_STOP_IDS, SamplingParams
from jaxinfer.generation.request import RequestOutput, Sequence
from jaxinfer.generation.runner import Flight, Runner
from jaxinfer.generation.sampling import LogitsProcessor
from jaxinfer.generation.scheduler import Batch, Scheduler
from jaxinfer.generation.structured import StructureCompiler
from jaxinfer.generation.text import Prompt, Tokenizer, encode_prompt
from jaxinfer.models import EncoderConfig
from jaxinfer.models.loading import LoadedModel

log = logging.getLogger(__name__)


class Engine:
    """Runs requests together on one model; a request may come or go between any two steps.

    Args:
      model: the loaded model, a decoder to generate and embed, or an encoder to embed.
      tokenizer: its tokenizer, or None for token ids only.
      config: the engine's sizes. num_pages: the size of a decoder's cache; `sizing.plan_memory` says what fits.
      processors: logits processors that requests can name.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        num_pages: int = 0,
        processors: Mapping[str, LogitsProcessor] | None = None,
    ):
        if model.mesh is not None and (data := model.mesh.shape.get("data", 1)) > 1:
            raise ValueError(
                f"MeshConfig.data={data} is not implemented for generation; split by tensor, or run a process per copy."
            )
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.adapters: AdapterSlots | None = None
        if isinstance(model.config, EncoderConfig):
            # They have the methods that an engine calls; what only generation asks of the others stays unasked.
            self.scheduler: Scheduler = EncoderScheduler(config)  # type: ignore[assignment]
            self.runner: Runner = EncoderRunner(model, config)  # type: ignore[assignment]
        else:
            if config.max_adapters:
                self.adapters = AdapterSlots(
                    config.max_adapters,
                    config.max_lora_rank,
                    config.adapter_bytes,
                    model.description.family,
                    model.config,
                )
            pages = PagePool(num_pages, config.page_size)
            self.scheduler = Scheduler(config, pages, self.adapters)
            self.runner = Runner(
                model, config, num_pages=num_pages, processors=processors or {}, adapters=self.adapters
            )
        # Virtual devices on a CPU deadlock when the collectives of two programs are in flight.
        several = model.mesh is not None and model.mesh.size > 1
        self._overlap = config.overlap and not (several and jax.default_backend() == "cpu")
        self._structures: StructureCompiler | None = None
        self._in_flight: deque[Flight] = deque()
        self._ids = itertools.count()

    def step(self, max_steps: int | None = None) -> list[Sequence]:
        """Send the next step to the device and take back the one before; returns sequences that have advanced.

        `max_steps` bounds the tokens of each sequence in the step, drafts aside.
        """
        overlap = self._overlap and not self.scheduler.stepwise
        advanced = [] if overlap else self._collect(keep=0)
        batch = self._schedule(max_steps or self.config.max_decode_steps)
        if batch is not None:
            advanced += self._launch(batch)
        return advanced + self._collect(keep=1 if batch is not None and overlap else 0)

    def _schedule(self, steps: int) -> Batch | None:
        running = self.scheduler.running
        return self.scheduler.schedule(min(steps, self.runner.decode_steps(len(running))), self.runner.drafts(running))

    def _launch(self, batch: Batch) -> list[Sequence]:
        try:
            self._in_flight.append(self.runner.launch(batch))
        except Exception as error:
            return self._recover(batch, error)
        return []

    def _collect(self, *, keep: int) -> list[Sequence]:
        """Take back steps until at most `keep` are in flight."""
        advanced, self.scheduler.dropped = self.scheduler.dropped, []
        while len(self._in_flight) > keep:
            flight = self._in_flight.popleft()
            try:
                self.runner.collect(flight)
            except Exception as error:
                return advanced + self._recover(flight.batch, error)
            advanced += self.scheduler.commit(flight.batch)
        return advanced

    def _recover(self, batch: Batch, error: Exception) -> list[Sequence]:
        """End the requests of a step that failed; all others begin again from the tokens that the host has."""
        log.error("A step failed; its %d sequences end with an error.", len(batch.sequences), exc_info=error)
        for sequence in batch.sequences:
            if not sequence.finished:
                sequence.fail(f"{type(error).__name__}: {error}")
        self._in_flight.clear()
        self.scheduler.restart()
        self.runner.restart()
        return batch.sequences

    def drain(self) -> list[Sequence]:
        """Wait for the steps in flight; returns sequences that have advanced."""
        return self._collect(keep=0)

    @property
    def workspace(self) -> str:
        """What the programs compiled so far need beside weights and cache, for people to read."""
        return decimal(self.runner.workspace_bytes)

    def compile_ahead(self) -> int:
        """Compile every program that any request can need; returns how many were missing."""
        return self.runner.compile_ahead()

    def prepare(self, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """The sequences of one request, `params.n` of them, checked and not yet queued.

        Raises ValueError for an empty or too long prompt, unknown token ids, text without a tokenizer, a structure that
        does not compile, an unknown adapter or processor, or a request that the cache could never hold.
        """
        if isinstance(self.model.config, EncoderConfig):
            raise ValueError("This model is an encoder, which cannot generate: use Embedder or Engine.embed.")
        ids = self._encode(prompt, new=1)
        self._check_options(params)
        matcher = None if params.structure is None else self._compiler().matcher(params.structure)
        stop_ids = tuple(dict.fromkeys((*params.stop_ids, *(() if params.ignore_eos else self.model.eos_ids))))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids and the model's end-of-text ids are {len(stop_ids)}, at most {MAX_STOP_IDS}.")
        seed = secrets.randbits(32) if params.seed is None else params.seed
        request_id = str(next(self._ids))
        sequences = [
            Sequence(
                request_id,
                index,
                ids,
                params,
                prompt=prompt if isinstance(prompt, str) else None,
                # Completions of one seed differ by a fixed odd step, so that n of them are reproducible too.
                seed=(seed + 0x9E3779B9 * index) % 2**32,
                limit=self.context if params.max_tokens is None else min(self.context, len(ids) + params.max_tokens),
                stop_ids=stop_ids,
                stream=self.tokenizer.stream() if self.tokenizer else None,
                matcher=matcher and matcher.copy(),
                drafting=DraftControl(self.config.draft_tokens) if self.config.draft_tokens else None,
            )
            for index in range(params.n)
        ]
        self.scheduler.check(sequences[0])
        return sequences

    def prepare_embedding(self, prompt: Prompt, *, adapter: str | None = None, priority: int = 0) -> Sequence:
        """The sequence of a request for a prompt's vector, checked and not yet queued; it ends up in `vector`.

        A decoder's is the mean of its last hidden vectors, an encoder's what its `Pooling` says; both have length 1.
        Raises ValueError as `prepare` does; a prompt may fill the context.
        """
        ids = self._encode(prompt, new=0)
        params = SamplingParams(max_tokens=1, seed=0, adapter=adapter, priority=priority)
        self._check_options(params)
        sequence = Sequence(
            str(next(self._ids)),
            0,
            ids,
            params,
            prompt=prompt if isinstance(prompt, str) else None,
            seed=0,
            limit=len(ids) + 1,
            stop_ids=(),
            stream=None,
            pooled=True,
        )
        self.scheduler.check(sequence)
        return sequence

    @property
    def context(self) -> int:
        return self.config.context

    def _encode(self, prompt: Prompt, *, new: int) -> list[int]:
        """The prompt's token ids; at least `new` more fit into the context."""
        ids = encode_prompt(self.tokenizer, prompt, self.model.config.vocab)
        if not ids:
            raise ValueError("The prompt is empty: give at least one token.")
        if len(ids) + new > self.context:
            why = "leaves no room to generate" if new else "is shorter"
            raise ValueError(
                f"The prompt has {len(ids)} tokens; the context of {self.context} {why}. "
                "Shorten the prompt or raise the context."
            )
        return ids

    def _check_options(self, params: SamplingParams) -> None:
        """What a request asks of this engine in particular."""
        vocab = self.model.config.vocab
        for name in ("stop_ids", "logit_bias"):
            if unknown := [i for i in getattr(params, name) if not 0 <= i < vocab]:
                raise ValueError(f"SamplingParams.{name} holds {unknown[:5]}, outside the vocabulary [0, {vocab}).")
        if params.stop and self.tokenizer is None:
            raise ValueError("SamplingParams.stop needs a tokenizer, and the model directory has none: use stop_ids.")
        if unknown := [name for name in params.processors if name not in self.runner.processors]:
            known = ", ".join(self.runner.processors) or "none"
            raise ValueError(f"SamplingParams.processors holds {unknown}, unknown to this engine; known: {known}.")
        if params.adapter is not None:
            if self.adapters is None:
                raise ValueError(
                    f"SamplingParams.adapter is {params.adapter!r}, but the engine has no room for adapters: give LLM "
                    "its adapters, or EngineConfig.max_adapters."
                )
            self.adapters.check(params.adapter)

    def _compiler(self) -> StructureCompiler:
        if self.tokenizer is None:
            raise ValueError("SamplingParams.structure needs a tokenizer, and the model directory has none.")
        if self._structures is None:
            self._structures = StructureCompiler(
                self.tokenizer.to_json(), vocab=self.model.config.vocab, eos_ids=self.model.eos_ids
            )
        return self._structures

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of a prepared request."""
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Give up a request; its pages are free at once."""
        self.scheduler.abort(request_id)

    def run(
        self, requests: list[list[Sequence]], max_steps: int | None = None, *, compiled: bool = False
    ) -> Iterator[list[Sequence]]:
        """Queue prepared requests and step until all have ended; yields the sequences that each step has advanced.

        `max_steps` is that of `step`; `compiled` says that what the requests need has been compiled ahead. Closing the
        iterator gives the requests up.
        """
        sequences = [s for request in requests for s in request]
        if sequences and not compiled:
            self.runner.compile_ahead(sequences)
        try:
            for request in requests:
                self.add(request)
            while not all(s.finished for s in sequences):
                yield self.step(max_steps)
        finally:
            for request in requests:
                self.abort(request[0].request_id)
            self.drain()
            self.runner.save_costs()

    def embed(self, texts: Iterable[Prompt], *, adapter: str | None = None) -> np.ndarray:
        """The vectors of texts or token ids, of length 1: float32 [texts, D].

        Raises ValueError for an invalid text, naming it, before anything runs; RuntimeError if a step fails.
        """
        sequences = []
        for index, text in enumerate(texts):
            try:
                sequences.append(self.prepare_embedding(text, adapter=adapter))
            except ValueError as error:
                raise ValueError(f"Text {index}: {error}") from error
        for _ in self.run([[sequence] for sequence in sequences]):
            pass
        for index, sequence in enumerate(sequences):
            if sequence.error is not None:
                raise RuntimeError(f"Text {index}: {sequence.error}")
        return np.array([s.vector for s in sequences], np.float32).reshape(-1, self.model.config.embed)

    @staticmethod
    def output(sequences: list[Sequence]) -> RequestOutput:
        """One request's completions, as far as they have come."""
        first = sequences[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_ids=first.ids[: first.prompt_length],
            prompt_logprobs=None if first.params.prompt_logprobs is None else list(first.prompt_logprobs),
            completions=[s.completion() for s in sequences],
            cached_tokens=min(s.cached or 0 for s in sequences),
        )
