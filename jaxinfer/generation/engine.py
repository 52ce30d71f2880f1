"""The engine: requests in, tokens out, one step at a time."""

import itertools
import secrets

from jaxinfer.generation.pages import PagePool
from jaxinfer.generation.params import MAX_STOP_IDS, SamplingParams
from jaxinfer.generation.request import RequestOutput, Sequence
from jaxinfer.generation.runner import Runner
from jaxinfer.generation.scheduler import Scheduler
from jaxinfer.generation.text import Prompt, Tokenizer, encode_prompt
from jaxinfer.models.loading import LoadedModel


class Engine:
    """Runs requests together on one model; a request may come or go between any two steps.

    Args:
      model: the loaded model. tokenizer: its tokenizer, or None for token ids only.
      slots: most sequences at once. context: most tokens of one, prompt and output together.
      num_pages, page_size: the size of the KV cache, pages of `page_size` tokens.
      chunk: most prompt tokens of a row in one step. prefill_tokens: most prompt tokens of all rows, padding included.
      max_decode_steps: most tokens a row decodes in one dispatch.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer | None,
        *,
        slots: int,
        context: int,
        num_pages: int,
        page_size: int = 16,
        chunk: int = 512,
        prefill_tokens: int = 2048,
        max_decode_steps: int = 16,
    ):
        if model.mesh is not None and (data := model.mesh.shape.get("data", 1)) > 1:
            raise ValueError(
                f"MeshConfig.data={data} is not implemented for generation; split by tensor, or run a process per copy."
            )
        self.model, self.tokenizer, self.context = model, tokenizer, context
        chunk = min(chunk, context)
        self.scheduler = Scheduler(
            slots=slots, pages=PagePool(num_pages), page_size=page_size, chunk=chunk, prefill_tokens=prefill_tokens
        )
        self.runner = Runner(
            model,
            slots=slots,
            context=context,
            num_pages=num_pages,
            page_size=page_size,
            chunk=chunk,
            max_decode_steps=max_decode_steps,
        )
        self._ids = itertools.count()

    def step(self, max_steps: int | None = None) -> list[Sequence]:
        """Run one batch; returns its sequences, advanced. `max_steps` bounds the tokens decoded in it."""
        batch = self.scheduler.schedule(min(max_steps or self.runner.max_decode_steps, self.runner.max_decode_steps))
        if batch is None:
            return []
        self.runner.run(batch)
        return self.scheduler.commit(batch)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """The sequences of one request, `params.n` of them, checked and not yet queued.

        Raises ValueError for an empty or too long prompt, unknown token ids, text without a tokenizer, or a request
        that the cache could never hold.
        """
        vocab = self.model.config.vocab
        ids = encode_prompt(self.tokenizer, prompt, vocab)
        if not ids:
            raise ValueError("The prompt is empty: give at least one token.")
        for name in ("stop_ids", "logit_bias"):
            if unknown := [i for i in getattr(params, name) if not 0 <= i < vocab]:
                raise ValueError(f"SamplingParams.{name} holds {unknown[:5]}, outside the vocabulary [0, {vocab}).")
        if len(ids) >= self.context:
            raise ValueError(
                f"The prompt has {len(ids)} tokens; the context of {self.context} leaves no room to generate. "
                "Shorten the prompt or raise the context."
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("SamplingParams.stop needs a tokenizer, and the model directory has none: use stop_ids.")
        stop_ids = tuple(dict.fromkeys((*params.stop_ids, *(() if params.ignore_eos else self.model.eos_ids))))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids and the model's end-of-text ids are {len(stop_ids)}, at most {MAX_STOP_IDS}.")
        limit = self.context if params.max_tokens is None else min(self.context, len(ids) + params.max_tokens)
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
                limit=limit,
                stop_ids=stop_ids,
                stream=self.tokenizer.stream() if self.tokenizer else None,
            )
            for index in range(params.n)
        ]
        self.scheduler.check(sequences[0])
        return sequences

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of a prepared request."""
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Give up a request; its pages are free at once."""
        self.scheduler.abort(request_id)

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
        )
