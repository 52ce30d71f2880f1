"""Runs batches on the device: owns the caches, the compiled programs, and the arrays that go in and out."""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.compiled import CostRecords, Program, ProgramCache, round_up
from jaxinfer.generation import signatures
from jaxinfer.generation.adapters import AdapterSlots
from jaxinfer.generation.builder import ProgramBuilder
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.drafting import PassCosts
from jaxinfer.generation.programs import Decoded, DeviceState, Pieces, Rows, Slots, Stepped
from jaxinfer.generation.request import Sequence, TokenLogprob
from jaxinfer.generation.sampling import LogitsProcessor, Logprobs, RowOptions, idle_options, sampling_arrays
from jaxinfer.generation.scheduler import Batch
from jaxinfer.models import LayerAdapters
from jaxinfer.models.devices import available_bytes
from jaxinfer.models.loading import LoadedModel

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
        self.config, self.processors = config, dict(processors)
        self._builder = ProgramBuilder(model, config, num_pages=num_pages, processors=processors)
        self._state: DeviceState = _zeros(self._builder.state)
        self._slots = adapters
        self._adapters: list[LayerAdapters] | None = _zeros(self._builder.adapters)
        self._masks: dict[int, jax.Array] = {}
        self.programs = ProgramCache(self._builder.build)
        self._records = CostRecords(f"{model.config} {model.weights} {model.mesh} {config} {num_pages}")
        self._costs = PassCosts()
        self._ready = 0.0  # when the last step had come back

    def restart(self) -> None:
        """Begin with an empty state, after a step that failed may have destroyed it."""
        for array in jax.tree.leaves(self._state):
            array.delete()  # there is no room for two
        self._state = _zeros(self._builder.state)

    def compile_ahead(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Compile every program that these sequences can need, run together; returns how many were missing.

        None: every program that any can need. Raises MemoryError if the largest leaves no room to run it.
        """
        missing = self.programs.compile_ahead(self._builder.wanted(sequences))
        if missing and (workspace := self.workspace_bytes) > (free := available_bytes(self._builder.model.mesh)):
            raise MemoryError(
                f"The programs need {workspace} bytes to run in, and {free} are free beside weights and cache: "
                "lower cache_bytes, max_batch or token_budget."
            )
        return missing

    @property
    def workspace_bytes(self) -> int:
        """What the largest program compiled so far needs while it runs, on each device."""
        return max((program.cost.workspace_bytes for program in self.programs), default=0)

    # Steps

    def launch(self, batch: Batch) -> Flight:
        """Send a step to the device, without waiting for it."""
        launched = time.perf_counter()
        self._upload_adapters()
        self._copy(batch.copies)
        self._admit(batch.admitted)
        program, result = self._step(batch) if batch.pieces else self._decode(batch)
        result = _asked_for(batch, result)
        for array in jax.tree.leaves(result):
            array.copy_to_host_async()
        return Flight(batch, program, result, launched)

    def _upload_adapters(self) -> None:
        """Fill the slots that have a new adapter; steps in flight keep the arrays they were given."""
        while self._slots is not None and self._slots.uploads:
            slot, adapter = self._slots.uploads[0]
            place = self.programs.get("place_adapter")
            self._adapters = place(self._adapters, np.int32(slot - 1), self._builder.layers_of(adapter))
            del self._slots.uploads[0]

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        if not copies:
            return
        count = round_up(len(copies), self._builder.admissions)
        source, target = np.zeros(count, np.int32), np.full(count, self._builder.num_pages, np.int32)
        source[: len(copies)], target[: len(copies)] = zip(*copies, strict=True)
        self._state = self.programs.get("copy", count=count)(self._state, source, target)

    def _admit(self, sequences: tuple[Sequence, ...]) -> None:
        if not sequences:
            return
        count = round_up(len(sequences), self._builder.admissions)
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
        count = round_up(len(batch.pieces), self.config.piece_counts)
        size = round_up(len(batch.rows), self.config.mixed_batches)
        table = self._table_width(batch)
        program = self.programs.get("step", pieces=count, batch=size, pages=table)
        slot, start, counts = np.full(count, self.config.slots, np.int32), *np.zeros((2, count), np.int32)
        last = np.zeros(count, np.bool_)
        for row, piece in enumerate(batch.pieces):
            slot[row], start[row], counts[row] = piece.sequence.slot, piece.start, piece.count
            last[row] = piece.last and not piece.sequence.pooled
        owners = [piece.sequence for piece in batch.pieces]
        pieces: Any = Pieces(slot, start, counts, last, self._tables(owners, count, table))  # type: ignore[arg-type]
        mask = self._mask([*owners, *[None] * (count - len(owners)), *batch.rows], count + size)
        self._state, result = program(
            self._builder.leaves, self._adapters, self._state, pieces, self._rows(batch.rows, size, table), mask
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
            self._builder.leaves, self._adapters, self._state, rows, mask, np.int32(batch.steps), limit
        )
        return program, result

    def _table_width(self, batch: Batch) -> int:
        return round_up(max(len(s.pages) for s in batch.sequences), self._builder.tables)

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
                shape = self._builder.place(signatures.mask(count, self._builder.decoder.vocab))
                self._masks[count] = jnp.full(shape.shape, EVERYTHING, shape.dtype, device=shape.sharding)
            return self._masks[count]
        mask = np.full(signatures.mask(count, self._builder.decoder.vocab).shape, EVERYTHING, np.uint32)
        for row, sequence in enumerate(sequences):
            if sequence is not None and sequence.matcher is not None and not sequence.matcher.finished:
                try:
                    sequence.matcher.mask(mask[row])
                except ValueError as error:  # no token of this model can go on: that is this request's end alone
                    sequence.fail(str(error))
        return mask

    # Results

    def collect(self, flight: Flight) -> None:
        """Wait for a step and give its tokens to its sequences."""
        batch, result = flight.batch, jax.device_get(flight.result)
        now = time.perf_counter()
        seconds, self._ready = now - max(flight.launched, self._ready), now
        if isinstance(result, Stepped):
            flight.program.cost.record(seconds)
            self._take_step(batch, result)
        else:
            plain, drafted = map(int, result.steps)
            flight.program.cost.record(seconds, steps=max(1, plain + drafted))
            self._costs.record(self._batch(len(batch.rows)), seconds, plain, drafted)
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
                    cost = self._costs.ratio(self._batch(len(batch.rows)))
                    sequence.drafting.record(passes, int(result.accepted[row]), produced, cost)
            for at in range(int(result.produced[row])):
                if not sequence.finished:  # a stop string may end it before the device knew
                    _append(sequence, result.tokens[row, at], result.logprobs, (row, at))

    # What programs cost

    def _batch(self, rows: int) -> int:
        """The size that so many rows are padded to."""
        return round_up(max(1, min(rows, self.config.slots)), self.config.batches)

    def decode_steps(self, rows: int) -> int:
        """How many decode steps of so many rows make a dispatch; one, to learn what it costs, the first time."""
        seconds = self._costs.plain(self._batch(rows))
        return 1 if seconds is None else max(1, min(self.config.max_decode_steps, int(DISPATCH_SECONDS / seconds)))

    def drafts(self, rows: Iterable[Sequence]) -> int:
        """Drafts of a pass: those of the config while any of these sequences gains by them, else 0."""
        return self.config.draft_tokens if any(self._draft_limit(s) for s in rows) else 0

    @staticmethod
    def _draft_limit(sequence: Sequence) -> int:
        return sequence.drafting.limit(len(sequence.ids) - sequence.prompt_length) if sequence.drafting else 0

    def save_costs(self) -> None:
        """Add what the programs cost to the records of this kind of device."""
        self._records.save(self.programs)


def _zeros(shapes: Any) -> Any:
    """Arrays of these shapes, where they say."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def _asked_for(batch: Batch, result: Any) -> Any:
    """The results without those that no sequence of the batch has asked for: they stay on the device."""
    asked = {
        "logprobs": any(s.params.logprobs is not None for s in batch.sequences),
        "prompt": any(s.params.prompt_logprobs is not None for s in batch.sequences),
        "pooled": any(s.pooled for s in batch.sequences),
    }
    return result._replace(**{name: None for name in result._fields if not asked.get(name, True)})


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
