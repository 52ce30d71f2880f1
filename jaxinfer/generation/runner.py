"""Runs batches on the device: owns the caches, the compiled programs, and the arrays that go in and out."""

import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.compiled import (
    Bucket,
    CostRecords,
    Program,
    ProgramCache,
    compile_program,
    compiler_options,
    powers,
    round_up,
)
from jaxinfer.generation.programs import Decoded, DeviceState, Prefilled, Rows, decode, prefill
from jaxinfer.generation.request import Sequence, TokenLogprob
from jaxinfer.generation.sampling import IDLE, Logprobs, RowOptions, sampling_arrays
from jaxinfer.generation.scheduler import Batch, Decode, Prefill
from jaxinfer.models import KVPages
from jaxinfer.models.loading import LoadedModel

SMALLEST_CHUNK = 16
SMALLEST_PAGES = 8


class Runner:
    """The device side of the engine.

    Args:
      model: weights and config. slots: most sequences at once. context: most tokens of one.
      num_pages, page_size: the cache. chunk: most prompt tokens of a row in one step.
      max_decode_steps: most tokens a row decodes in one dispatch.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        slots: int,
        context: int,
        num_pages: int,
        page_size: int,
        chunk: int,
        max_decode_steps: int,
    ):
        self.model, self.page_size, self.max_decode_steps = model, page_size, max_decode_steps
        self._slots = slots
        self._batches = powers(2, 1, slots)
        self._chunks = powers(4, min(SMALLEST_CHUNK, chunk), chunk)
        most_pages = -(-context // page_size)
        self._pages = powers(2, min(SMALLEST_PAGES, most_pages), most_pages)
        self._leaves, self._treedef = jax.tree.flatten(model.state)
        self._state = self._empty_state(num_pages, context)
        self._state_shardings = jax.tree.map(lambda x: x.sharding, self._state)
        self.programs = ProgramCache(self._build)
        sizes = (slots, context, num_pages, page_size, max_decode_steps)
        self._records = CostRecords(f"{model.config} {model.weights} {model.mesh} {sizes}")
        self._kept_rows: tuple[tuple, Rows] | None = None

    def _empty_state(self, num_pages: int, context: int) -> DeviceState:
        attention = self.model.config.attention
        shape = (num_pages, self.page_size, attention.kv_heads, attention.head_dim)
        sharding = self.model.sharding("pages", "page", "kv_heads", "head_dim", shape=shape)
        zeros = functools.partial(jnp.zeros, shape, self.model.weights.dtype, device=sharding)
        caches = [KVPages(zeros(), zeros()) for _ in range(self.model.config.layers)]
        replicated = self.model.sharding(None, None, shape=(self._slots + 1, context))
        return DeviceState(caches, jnp.zeros((self._slots + 1, context), jnp.int32, device=replicated))

    # Programs

    def _build(self, name: str, bucket: Bucket) -> Program:
        """Compile `prefill` or `decode` for a bucket."""
        sizes, graphdef, treedef = dict(bucket), self.model.graphdef, self._treedef
        batch = sizes["batch"]
        idle = self._make_rows((), batch, sizes["pages"])
        per_row = jax.ShapeDtypeStruct((batch,), jnp.int32)
        if name == "prefill":
            chunk = jax.ShapeDtypeStruct((batch, sizes["tokens"]), jnp.int32)
            body, inputs = prefill, (chunk, chunk, per_row, per_row)
        else:
            body = functools.partial(decode, max_steps=self.max_decode_steps)
            inputs = (per_row, jax.ShapeDtypeStruct((), jnp.int32))

        def function(leaves: list[jax.Array], state: DeviceState, rows: Rows, *rest: jax.Array):
            return body(nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), state, rows, *rest)

        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state)
        platform = next(iter(self._leaves[0].devices())).platform
        return compile_program(
            name,
            bucket,
            function,
            (self._leaves, state, idle, *inputs),
            donate=(1,),
            # A mesh leaves the results' placement to the compiler; the state must come back where it was.
            out_shardings=(self._state_shardings, None) if self.model.mesh else None,
            compiler_options=compiler_options(
                platform,
                rows=batch * sizes.get("tokens", 1),
                dtype=self.model.weights.matrix_dtype,
                weight_bytes=sum(leaf.nbytes for leaf in self._leaves),
            ),
        )

    def compile_ahead(self, sequences: Iterable[Sequence]) -> int:
        """Compile every program that these sequences can need, run together; returns how many were missing."""
        return self.programs.compile_ahead(self._wanted(list(sequences)))

    def _wanted(self, sequences: list[Sequence]) -> Iterator[tuple[str, dict[str, int]]]:
        """Every (name, sizes) that `_prefill` and `_decode` can ask for while these sequences come and go."""
        most = round_up(min(len(sequences), self._slots), self._batches)
        prompts = [s.prompt_length for s in sequences]
        widths = {round_up(min(p, self._chunks[-1]), self._chunks) for p in prompts}
        widths |= {round_up(rest, self._chunks) for p in prompts if (rest := p % self._chunks[-1])}
        prefill_pages = self._page_range(min(min(prompts), self._chunks[-1]), max(prompts))
        longer = [s for s in sequences if s.limit > s.prompt_length + 1]  # the first new token comes of the prefill
        decode_pages = self._page_range(min(prompts) + 1, max(s.limit for s in longer)) if longer else ()
        for batch in self._batches[: self._batches.index(most) + 1]:
            for pages in decode_pages:
                yield "decode", {"batch": batch, "pages": pages}
            for tokens, pages in itertools.product(sorted(widths), prefill_pages):
                if tokens < 4 * pages * self.page_size:  # else a narrower chunk would do
                    yield "prefill", {"batch": batch, "tokens": tokens, "pages": pages}

    def _page_range(self, least_tokens: int, most_tokens: int) -> tuple[int, ...]:
        first, last = (self._pages.index(self._page_bucket(tokens)) for tokens in (least_tokens, most_tokens))
        return self._pages[first : last + 1]

    def _page_bucket(self, tokens: int) -> int:
        return round_up(-(-tokens // self.page_size), self._pages)

    # Batches

    def run(self, batch: Batch) -> None:
        """Run one batch and give its tokens to its sequences."""
        match batch:
            case Prefill():
                self._prefill(batch)
            case Decode():
                self._decode(batch)

    def _prefill(self, batch: Prefill) -> None:
        rows = round_up(len(batch.sequences), self._batches)
        width = round_up(max(batch.counts), self._chunks)
        start, count = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        tokens, following = np.zeros((2, rows, width), np.int32)
        for row, (sequence, size) in enumerate(zip(batch.sequences, batch.counts, strict=True)):
            at = sequence.computed
            start[row], count[row] = at, size
            tokens[row, :size] = sequence.ids[at : at + size]
            after = sequence.ids[at + 1 : at + 1 + size]
            following[row, : len(after)] = after
        pages = self._page_bucket(int((start + count).max()))
        program = self.programs.get("prefill", batch=rows, tokens=width, pages=pages)
        result: Prefilled = self._call(program, batch.sequences, rows, pages, tokens, following, start, count)
        for row, (sequence, size) in enumerate(zip(batch.sequences, batch.counts, strict=True)):
            if (asked := sequence.params.prompt_logprobs) is not None:
                known = min(size, sequence.prompt_length - sequence.computed - 1)
                sequence.prompt_logprobs += [
                    _token_logprob(result.prompt, (row, t), following[row, t], asked) for t in range(known)
                ]
            if sequence.computed + size == sequence.prompt_length:
                self._append(sequence, result.tokens[row], result.logprobs, (row,))

    def _decode(self, batch: Decode) -> None:
        rows = round_up(len(batch.sequences), self._batches)
        length = np.zeros(rows, np.int32)
        length[: len(batch.sequences)] = [len(s.ids) for s in batch.sequences]
        reach = max(min(len(s.ids) + batch.steps, s.limit) for s in batch.sequences)
        pages = self._page_bucket(reach)
        program = self.programs.get("decode", batch=rows, pages=pages)
        result: Decoded = self._call(program, batch.sequences, rows, pages, length, np.int32(batch.steps))
        for row, sequence in enumerate(batch.sequences):
            for step in range(result.produced[row]):
                if not sequence.finished:  # a stop string may end it before the device knew
                    self._append(sequence, result.tokens[row, step], result.logprobs, (row, step))

    def _call(self, program: Program, sequences: tuple[Sequence, ...], rows: int, pages: int, *inputs: Any) -> Any:
        """Run a program on the state, wait for its results, and note what it cost."""
        start = time.perf_counter()
        self._state, result = program(self._leaves, self._state, self._rows_of(sequences, rows, pages), *inputs)
        result = jax.device_get(result)
        program.cost.record(time.perf_counter() - start)
        return result

    def _rows_of(self, sequences: tuple[Sequence, ...], rows: int, pages: int) -> Rows:
        """The rows of a batch on the device, kept while the batch stays the same: they do not change as it grows."""
        key = (rows, pages, *((s.request_id, s.index) for s in sequences))
        if self._kept_rows is None or self._kept_rows[0] != key:
            self._kept_rows = key, jax.device_put(self._make_rows(sequences, rows, pages))
        return self._kept_rows[1]

    def _make_rows(self, sequences: tuple[Sequence, ...], rows: int, pages: int) -> Rows:
        table: Any = np.zeros((rows, pages), np.int32)
        slot: Any = np.full(rows, self._slots, np.int32)
        limit: Any = np.zeros(rows, np.int32)
        options = [IDLE] * rows
        for row, s in enumerate(sequences):
            held = s.pages[:pages]
            table[row, : len(held)] = held
            slot[row], limit[row] = s.slot, s.limit
            options[row] = RowOptions(s.params, s.seed, s.prompt_length, s.stop_ids)
        return Rows(slot, limit, table, sampling_arrays(options))

    @staticmethod
    def _append(sequence: Sequence, token: Any, logprobs: Logprobs, at: tuple[int, ...]) -> None:
        asked = sequence.params.logprobs
        sequence.append(int(token), None if asked is None else _token_logprob(logprobs, at, token, asked))

    def save_costs(self) -> None:
        """Add what the programs cost to the records of this kind of device."""
        self._records.save(self.programs)


def _token_logprob(logprobs: Logprobs, at: tuple[int, ...], token: int, count: int) -> TokenLogprob:
    top = zip(logprobs.top_ids[at][:count], logprobs.top[at][:count], strict=True)
    return TokenLogprob(int(token), float(logprobs.chosen[at]), {int(i): float(p) for i, p in top if i >= 0})
