"""Runs batches on the device: owns the caches, the compiled programs, and the arrays that go in and out."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
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
from jaxinfer.generation import signatures
from jaxinfer.generation.adapters import AdapterSlots
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.programs import Decoded, DeviceState, Pieces, Rows, Slots, Stepped
from jaxinfer.generation.request import Sequence, TokenLogprob
from jaxinfer.generation.sampling import LogitsProcessor, Logprobs, RowOptions, idle_options, sampling_arrays
from jaxinfer.generation.scheduler import Batch
from jaxinfer.models import DecoderConfig, LayerAdapters, LowRankStack
from jaxinfer.models.adapters import Adapter, adapter_shapes
from jaxinfer.models.loading import LoadedModel

SMALLEST_PAGES = 8
DISPATCH_SECONDS = 0.01
"""What a dispatch of several decode steps may take, so that a new request need not wait long."""
EVERYTHING = np.uint32(0xFFFFFFFF)


@dataclasses.dataclass(frozen=True)
class Flight:
    """A step on the device: what it is about, and its results to come."""

    batch: Batch
    program: Program
    result: Stepped | Decoded
    launched: float


class Runner:
    """The device side of the engine.

    Args:
      model: weights and config. config: the engine's sizes. num_pages: the size of the cache.
      processors: logits processors by name. adapters: which adapter is in which slot, or None without adapters.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        num_pages: int,
        processors: Mapping[str, LogitsProcessor],
        adapters: AdapterSlots | None,
    ):
        assert isinstance(model.config, DecoderConfig)
        self.model, self.config, self.processors = model, config, dict(processors)
        self._decoder = model.config
        self._leaves, self._treedef = jax.tree.flatten(model.state)
        self._platform = next(iter(self._leaves[0].devices())).platform
        most_pages = -(-config.context // config.page_size)
        # Attention on a CPU reads as many pages as there are, elsewhere as many as the table has.
        first = most_pages if self._platform == "cpu" else min(SMALLEST_PAGES, most_pages)
        self._pages = powers(2, first, most_pages)
        self._admissions = powers(8, 1, config.slots)
        self.num_pages = num_pages
        self._shapes = self._placed(
            signatures.device_state(
                self._decoder, model.weights, config, pages=num_pages, processors=len(self.processors)
            )
        )
        self._state = self._empty_state()
        self._slots = adapters
        self._adapters = None if adapters is None else self._empty_adapters()
        self._masks: dict[int, jax.Array] = {}
        self.programs = ProgramCache(self._build)
        self._records = CostRecords(f"{model.config} {model.weights} {model.mesh} {config} {num_pages}")
        self._ready = 0.0  # when the last step had come back
        self._timed = 0  # programs whose costs are on record

    # What is on the device

    def _place(self, x: jax.ShapeDtypeStruct, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.model.sharding(*axes, shape=x.shape))

    def _placed(self, state: DeviceState) -> DeviceState:
        """The shapes of the state with where each array lives."""

        def pages(x: Any) -> Any:
            names = ("pages", "page", "kv_heads", "head_dim") if x.ndim == 4 else ("pages", "kv_heads")
            return self._place(x, *names)

        caches: Any = jax.tree.map(pages, state.caches)
        return DeviceState(caches, jax.tree.map(lambda x: self._place(x, *[None] * x.ndim), state.slots))

    def _empty_state(self) -> DeviceState:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._shapes)

    def _empty_adapters(self) -> list[LayerAdapters]:
        shapes = adapter_shapes(self.model.description.family, self._decoder, self.config.max_lora_rank)
        stacks = signatures.adapters(shapes, self.config, self._decoder.layers, self.model.weights.dtype)
        axes = {"qkv": ("heads", None), "out": (None, "heads"), "up": ("mlp", None), "down": (None, "mlp")}

        def zeros(x: Any, *names: str | None) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype, device=self.model.sharding(*names, shape=x.shape))

        def stack(field: str, x: LowRankStack) -> LowRankStack:
            outputs, inputs = axes[field]
            return LowRankStack(zeros(x.a, None, None, inputs), zeros(x.b, outputs, None, None))

        return [LayerAdapters(**{f: stack(f, x) for f, x in layer._asdict().items()}) for layer in stacks]

    def restart(self) -> None:
        """Begin with an empty state, after a step that failed may have destroyed it."""
        self._state = self._empty_state()

    # Programs

    def _build(self, name: str, bucket: Bucket) -> Program:
        """Compile a program for a bucket."""
        sizes = dict(bucket)
        body, inputs = signatures.program(
            name, sizes, self.config, vocab=self._decoder.vocab, processors=tuple(self.processors.values())
        )
        shardings = None
        if self.model.mesh is not None:
            # The compiler may place what is not placed: inputs go to all devices, the state comes back where it was.
            inputs = jax.tree.map(lambda x: self._place(x, *[None] * x.ndim), inputs)
            shardings = jax.tree.map(lambda x: x.sharding, self._shapes)
        if name not in signatures.OF_MODEL:
            return compile_program(name, bucket, body, (self._shapes, *inputs), donate=(0,), out_shardings=shardings)
        graphdef, treedef = self.model.graphdef, self._treedef

        def function(leaves: list[jax.Array], adapters: Any, state: DeviceState, *rest: Any):
            return body(nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), adapters, state, *rest)

        return compile_program(
            name,
            bucket,
            function,
            (self._leaves, self._adapters, self._shapes, *inputs),
            donate=(2,),
            out_shardings=(shardings, None) if self.model.mesh else None,
            compiler_options=compiler_options(
                self._platform,
                rows=sizes["batch"] + sizes.get("pieces", 0) * sizes.get("tokens", 0),
                dtype=self.model.weights.matrix_dtype,
                weight_bytes=sum(leaf.nbytes for leaf in self._leaves),
            ),
        )

    def compile_ahead(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Compile every program that these sequences can need, run together; returns how many were missing.

        None: every program that any can need.
        """
        return self.programs.compile_ahead(self._wanted(None if sequences is None else list(sequences)))

    def _wanted(self, sequences: list[Sequence] | None) -> Iterator[tuple[str, dict[str, int]]]:
        """Every (name, sizes) that `launch` can ask for while these sequences, or any, come and go."""
        config = self.config
        count, longest, pages, generates = config.slots, config.context, self._pages, True
        if sequences is not None:
            count, longest = min(count, len(sequences)), max(s.limit for s in sequences) - 1
            pages = self._page_range(min(s.prompt_length for s in sequences), longest)
            generates = any(s.limit > s.prompt_length + 1 for s in sequences)  # the first token comes of the prompt
            if count * -(-longest // config.page_size) <= self.num_pages:  # none is preempted and computed again
                longest = max(s.prompt_length for s in sequences)
        for size in _up_to(count, self._admissions):
            yield "admit", {"count": size}
            if config.prefix_caching and (sequences is None or count > 1):
                yield "copy", {"count": size}
        for table in pages:
            for width in _up_to(longest, config.widths):
                most = min(config.most_pieces(width), count * -(-longest // width))
                beside = config.mixed_batches if generates and count > 1 else (0,)
                for pieces in _up_to(most, config.piece_counts(width)):
                    for batch in _up_to(count - 1, beside):
                        yield "step", {"pieces": pieces, "tokens": width, "batch": batch, "pages": table}
            for batch in _up_to(count, config.batches) if generates else ():
                for drafts in sorted({0, config.draft_tokens}):
                    yield "decode", {"batch": batch, "drafts": drafts, "pages": table}

    def _page_range(self, least_tokens: int, most_tokens: int) -> tuple[int, ...]:
        first, last = (self._pages.index(self._page_bucket(tokens)) for tokens in (least_tokens, most_tokens))
        return self._pages[first : last + 1]

    def _page_bucket(self, tokens: int) -> int:
        return round_up(-(-tokens // self.config.page_size), self._pages)

    # Steps

    def launch(self, batch: Batch) -> Flight:
        """Send a step to the device, without waiting for it."""
        launched = time.perf_counter()
        self._upload_adapters()
        self._copy(batch.copies)
        self._admit(batch.admitted)
        if batch.pieces:
            program, result = self._step(batch)
        else:
            program, result = self._decode(batch)
        for array in jax.tree.leaves(result):
            array.copy_to_host_async()
        return Flight(batch, program, result, launched)

    def _upload_adapters(self) -> None:
        if self._slots is None or self._adapters is None:
            return
        while self._slots.uploads:
            slot, adapter = self._slots.uploads.pop(0)
            self._adapters = [_with_adapter(layer, i, slot - 1, adapter) for i, layer in enumerate(self._adapters)]

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        if not copies:
            return
        count = round_up(len(copies), self._admissions)
        source, target = np.zeros(count, np.int32), np.full(count, self.num_pages, np.int32)
        source[: len(copies)], target[: len(copies)] = zip(*copies, strict=True)
        self._state = self.programs.get("copy", count=count)(self._state, source, target)

    def _admit(self, sequences: tuple[Sequence, ...]) -> None:
        if not sequences:
            return
        count = round_up(len(sequences), self._admissions)
        slot = np.full(count, self.config.slots + 1, np.int32)
        rows = Slots(
            history=np.zeros((count, self.config.context), np.int32),  # type: ignore[arg-type]  # numpy until it is sent
            length=np.zeros(count, np.int32),  # type: ignore[arg-type]
            active=np.zeros(count, np.bool_),  # type: ignore[arg-type]
            limit=np.zeros(count, np.int32),  # type: ignore[arg-type]
            adapter=np.zeros(count, np.int32),  # type: ignore[arg-type]
            options=sampling_arrays(
                [self._options(s) for s in sequences] + [idle_options(len(self.processors))] * (count - len(sequences))
            ),
        )
        for row, sequence in enumerate(sequences):
            slot[row], rows.length[row] = sequence.slot, len(sequence.ids)
            rows.history[row, : len(sequence.ids)] = sequence.ids
            # A prompt that the cache knows generates at once; others when their last piece is through.
            rows.active[row] = not sequence.prefilling and sequence.computed < len(sequence.ids)
            rows.limit[row], rows.adapter[row] = sequence.limit, sequence.adapter_slot
        self._state = self.programs.get("admit", count=count)(self._state, slot, rows)

    def _options(self, s: Sequence) -> RowOptions:
        wanted = tuple(name in s.params.processors for name in self.processors)
        return RowOptions(s.params, s.seed, s.prompt_length, s.stop_ids, wanted, s.pooled)

    def _step(self, batch: Batch) -> tuple[Program, Stepped]:
        count = round_up(len(batch.pieces), self.config.piece_counts(batch.width))
        size = round_up(len(batch.rows), self.config.mixed_batches)
        table = self._table_width(batch)
        program = self.programs.get("step", pieces=count, tokens=batch.width, batch=size, pages=table)
        slot, start, counts = np.full(count, self.config.slots, np.int32), *np.zeros((2, count), np.int32)
        last = np.zeros(count, np.bool_)
        for row, piece in enumerate(batch.pieces):
            slot[row], start[row], counts[row] = piece.sequence.slot, piece.start, piece.count
            last[row] = piece.last and not piece.sequence.pooled
        owners = [piece.sequence for piece in batch.pieces]
        pieces: Any = Pieces(slot, start, counts, last, self._tables(owners, count, table))  # type: ignore[arg-type]
        mask = self._mask([*owners, *[None] * (count - len(owners)), *batch.rows], count + size)
        self._state, result = program(
            self._leaves, self._adapters, self._state, pieces, self._rows(batch.rows, size, table), mask
        )
        return program, result

    def _decode(self, batch: Batch) -> tuple[Program, Decoded]:
        size = round_up(len(batch.rows), self.config.batches)
        table = self._table_width(batch)
        program = self.programs.get("decode", batch=size, drafts=batch.drafts, pages=table)
        limit = np.zeros(size, np.int32)
        for row, sequence in enumerate(batch.rows):
            limit[row] = min(batch.drafts, self._draft_limit(sequence))
        rows, mask = self._rows(batch.rows, size, table), self._mask(list(batch.rows), size)
        self._state, result = program(
            self._leaves, self._adapters, self._state, rows, mask, np.int32(batch.steps), limit
        )
        return program, result

    def _table_width(self, batch: Batch) -> int:
        return round_up(max(len(s.pages) for s in batch.sequences), self._pages)

    def _tables(self, sequences: Iterable[Sequence], count: int, width: int) -> np.ndarray:
        table = np.zeros((count, width), np.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.pages)] = sequence.pages
        return table

    def _rows(self, sequences: tuple[Sequence, ...], count: int, width: int) -> Any:
        slot = np.full(count, self.config.slots, np.int32)
        slot[: len(sequences)] = [s.slot for s in sequences]
        return Rows(slot, self._tables(sequences, count, width))  # type: ignore[arg-type]

    def _mask(self, sequences: list[Sequence | None], count: int) -> Any:
        """What each row may choose; kept on the device while no row has a structure."""
        if not any(s is not None and s.matcher is not None for s in sequences):
            if count not in self._masks:
                shape = signatures.mask(count, self._decoder.vocab).shape
                self._masks[count] = jnp.full(shape, EVERYTHING, jnp.uint32, device=self._replicated)
            return self._masks[count]
        mask = np.full(signatures.mask(count, self._decoder.vocab).shape, EVERYTHING, np.uint32)
        for row, sequence in enumerate(sequences):
            if sequence is not None and sequence.matcher is not None and not sequence.matcher.finished:
                try:
                    sequence.matcher.mask(mask[row])
                except ValueError as error:  # no token of this model can go on: that is this request's end alone
                    sequence.fail(str(error))
        return mask

    @property
    def _replicated(self) -> Any:
        return jax.tree.leaves(self._shapes.slots)[0].sharding

    # Results

    def collect(self, flight: Flight) -> None:
        """Wait for a step and give its tokens to its sequences."""
        batch = flight.batch
        wants = any(s.params.logprobs is not None for s in batch.sequences)
        prompts = any(s.params.prompt_logprobs is not None for s in batch.sequences)
        pooled = any(s.pooled for s in batch.sequences)
        skipped = {"logprobs": wants, "prompt": prompts, "pooled": pooled}
        small = flight.result._replace(**{k: None for k, v in skipped.items() if not v and hasattr(flight.result, k)})
        result = jax.device_get(small)
        now = time.perf_counter()
        seconds, self._ready = now - max(flight.launched, self._ready), now
        if isinstance(result, Stepped):
            flight.program.cost.record(seconds)
            self._take_step(batch, result)
        else:
            flight.program.cost.record(seconds, steps=max(1, int(result.steps.sum())))
            self._take_decode(batch, result)

    def _take_step(self, batch: Batch, result: Stepped) -> None:
        for row, piece in enumerate(batch.pieces):
            sequence = piece.sequence
            if sequence.finished:
                continue
            if sequence.params.prompt_logprobs is not None:
                _take_prompt_logprobs(piece.start, piece.count, sequence, result.prompt, row)
            if sequence.pooled:
                sequence.pool(np.asarray(result.pooled[row]), piece.start, last=piece.last)
            elif piece.last:
                _append(sequence, result.tokens[row], result.logprobs, (row,))
        padding = len(result.tokens) - round_up(len(batch.rows), self.config.mixed_batches)
        for row, sequence in enumerate(batch.rows, padding):
            if not sequence.finished and result.produced[row]:
                _append(sequence, result.tokens[row], result.logprobs, (row,))

    def _take_decode(self, batch: Batch, result: Decoded) -> None:
        for row, sequence in enumerate(batch.rows):
            if sequence.finished:
                continue
            if drafted := int(result.drafted[row]):
                sequence.drafted += drafted
                sequence.accepted += int(result.accepted[row])
                if sequence.drafting is not None:
                    passes, produced = -(-drafted // batch.drafts), len(sequence.ids) - sequence.prompt_length
                    cost = self._draft_cost(len(batch.rows))
                    sequence.drafting.record(passes, int(result.accepted[row]), produced, cost)
            for at in range(int(result.produced[row])):
                if not sequence.finished:  # a stop string may end it before the device knew
                    _append(sequence, result.tokens[row, at], result.logprobs, (row, at))

    # What programs cost

    def decode_steps(self, rows: int) -> int:
        """How many decode steps of so many rows make a dispatch."""
        seconds = self._step_seconds(rows, 0)
        most = self.config.max_decode_steps
        return most if seconds is None else max(1, min(most, int(DISPATCH_SECONDS / seconds)))

    def drafts(self, rows: Iterable[Sequence]) -> int:
        """Drafts of a pass: those of the config while any of these sequences gains by them, else 0."""
        return self.config.draft_tokens if any(self._draft_limit(s) for s in rows) else 0

    @staticmethod
    def _draft_limit(sequence: Sequence) -> int:
        return sequence.drafting.limit(len(sequence.ids) - sequence.prompt_length) if sequence.drafting else 0

    def _draft_cost(self, rows: int) -> float:
        """How much longer a pass with drafts takes than one without."""
        narrow, wide = self._step_seconds(rows, 0), self._step_seconds(rows, self.config.draft_tokens)
        return 2.0 if narrow is None or wide is None else wide / narrow

    def _step_seconds(self, rows: int, drafts: int) -> float | None:
        """The quickest pass of a decode program for so many rows, if it has run."""
        batch = round_up(max(1, min(rows, self.config.slots)), self.config.batches)
        found = [
            program.cost.best_seconds
            for table in self._pages
            if (program := self.programs.find("decode", batch=batch, drafts=drafts, pages=table)) and program.cost.calls
        ]
        return min(found, default=None)

    def save_costs(self) -> None:
        """Add what the programs cost to the records of this kind of device, if one has run that had not before."""
        timed = sum(program.cost.calls > 0 for program in self.programs)
        if timed > self._timed:
            self._timed = timed
            self._records.save(self.programs)


def _up_to(most: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The ascending sizes up to the one that holds `most`; all if none does."""
    return sizes[: next((i for i, size in enumerate(sizes) if size >= most), len(sizes)) + 1]


def _append(sequence: Sequence, token: Any, logprobs: Logprobs, at: tuple[int, ...]) -> None:
    asked = sequence.params.logprobs
    sequence.append(int(token), None if asked is None else _token_logprob(logprobs, at, token, asked))


def _take_prompt_logprobs(start: int, count: int, sequence: Sequence, found: Logprobs, row: int) -> None:
    """Those of the tokens after a piece's; a piece that is computed again brings nothing new."""
    asked, known = sequence.params.prompt_logprobs, sequence.prompt_logprobs
    assert asked is not None
    for t in range(count):
        following = start + t + 1
        if following == len(known) and following < sequence.prompt_length:
            known.append(_token_logprob(found, (row, t), sequence.ids[following], asked))


def _token_logprob(logprobs: Logprobs, at: tuple[int, ...], token: int, count: int) -> TokenLogprob:
    top = zip(logprobs.top_ids[at][:count], logprobs.top[at][:count], strict=True)
    return TokenLogprob(int(token), float(logprobs.chosen[at]), {int(i): float(p) for i, p in top if i >= 0})


def _with_adapter(layer: LayerAdapters, index: int, slot: int, adapter: Adapter) -> LayerAdapters:
    """A layer's stacks with one slot filled; zeros where the adapter leaves a linear alone."""

    def fill(stack: LowRankStack, name: str) -> LowRankStack:
        found = adapter.layers.get(f"layers.{index}.{name}")
        if found is None:
            return LowRankStack(stack.a.at[slot].set(0), stack.b.at[:, slot].set(0))
        return LowRankStack(stack.a.at[slot].set(found.a), stack.b.at[:, slot].set(found.b))

    return LayerAdapters(**{f: fill(stack, signatures.LINEARS[f]) for f, stack in layer._asdict().items()})
