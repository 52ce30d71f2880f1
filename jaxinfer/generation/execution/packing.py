"""Packs a batch, padded to its buckets, into arrays on the host: the inputs of commands."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.generation.engine.batch import Admission, Batch, Chunk, DecodeRow, PageBlock, Restored, RestoredState
from jaxinfer.generation.engine.buckets import Buckets, EncoderBuckets
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs.admit import Admit
from jaxinfer.generation.execution.programs.copy_pages import CopyPages
from jaxinfer.generation.execution.programs.copy_states import CopyStates
from jaxinfer.generation.execution.programs.embed import EncoderSizes
from jaxinfer.generation.execution.programs.gather_pages import GatherPages
from jaxinfer.generation.execution.programs.gather_states import GatherStates
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.pipeline import RingSchedule
from jaxinfer.generation.execution.programs.place_adapter import PlaceAdapter
from jaxinfer.generation.execution.programs.prefill import Chunks
from jaxinfer.generation.execution.programs.ring import decode_sizes, prefill_sizes
from jaxinfer.generation.execution.programs.scatter_pages import ScatterPages
from jaxinfer.generation.execution.programs.scatter_states import ScatterStates
from jaxinfer.generation.execution.slices import SlicePages, in_slice
from jaxinfer.generation.execution.state import Rows, Slots
from jaxinfer.generation.sampling.arrays import RowOptions, idle_options, sampling_arrays
from jaxinfer.sharding.schedules import queued_stride
from jaxinfer.sizes import round_up

ALL_TOKENS = np.uint32(0xFFFFFFFF)


class PassInputs(NamedTuple):
    """The inputs of a decoder's pass, or of several over the same rows.

    Attributes:
      chunks: chunks of prompts; None: there are none.
      rows: requests that decode.
      bitmask: uint32 [M + B, V / 32], the tokens that may be chosen; None: all.
      passes: int32 [], how many passes.
      speculation_limits: int32 [B], how many speculative tokens each row may have in a pass.
      schedule: how micro-batches go through the stages of a pipeline; None: there is none.
      pages: those of the cache that come to the devices for it; None: all are there.
    """

    chunks: Chunks | None
    rows: Rows
    bitmask: np.ndarray | None
    passes: np.int32
    speculation_limits: np.ndarray
    schedule: RingSchedule | None = None
    pages: SlicePages | None = None


class Packer:
    """Makes the commands of a decoder's batches.

    Args:
      layout: the shapes on the device.
      buckets: the sizes that programs are compiled for.
      processors: the names of the logits processors, in the layout's order.
    """

    def __init__(self, layout: DeviceLayout, buckets: Buckets, processors: Iterable[str]):
        self.layout, self.buckets, self._processors = layout, buckets, tuple(processors)
        self._nowhere = layout.engine.max_batch  # a slot that no request has
        self._first_snapshot = layout.engine.max_batch + 1  # in the rows of states

    def changes(self, batch: Batch) -> list[Command]:
        """The commands that prepare the state for a batch: adapters come, pages are copied, slots are filled.

        Pages are read for the host before any is written, and come from the host after copies have read theirs. So do
        snapshots; but those of the step before are copied first, and slots take theirs last.
        """
        lanes = batch.lanes
        commands = [
            Command(PlaceAdapter(), (np.int32(index - 1), self.layout.adapter_layers(adapter)))
            for index, adapter in batch.adapter_uploads
        ]
        if batch.snapshots:
            first = self._first_snapshot
            copies = [[(slot, first + place) for slot, place in lane.snapshots] for lane in lanes]
            commands.append(self._copy_states(copies))
        if batch.keeps:
            commands += self._gathers(batch)
        copies, admissions = ([lane.copies for lane in lanes], [lane.admissions for lane in lanes])
        if count := max(map(len, copies)):
            count = round_up(count, self.buckets.admissions)
            commands.append(Command(CopyPages(count=count), _join([self._copies(lane, count) for lane in copies])))
        if batch.restored:
            for restored in itertools.zip_longest(*[lane.restored for lane in lanes]):
                commands += self._scatters(restored)
        if batch.restored_states:
            for states in itertools.zip_longest(*[lane.restored_states for lane in lanes]):
                commands.append(self._scatter_states(states))
        if self.layout.num_snapshots and any(used := [lane.used_snapshots for lane in lanes]):
            copies = [[(self._first_snapshot + place, slot) for place, slot in lane] for lane in used]
            commands.append(self._copy_states(copies))
        if count := max(map(len, admissions)):
            count = round_up(count, self.buckets.admissions)
            commands.append(Command(Admit(count=count), _join([self._admissions(lane, count) for lane in admissions])))
        return commands

    def pass_through(self, batch: Batch) -> Command:
        """The command that sends chunks and rows through the model, all lanes' padded to the same sizes."""
        sizes, used = pass_sizes(batch, self.buckets, self.layout.num_stages)
        pages = None
        if self.layout.slice_pages:
            batch, pages = in_slice(batch, self.layout.engine.page_size)
        lanes = batch.lanes
        places = [sizes.places(len(lane.rows), used) for lane in lanes]
        bitmask, schedule = None, None
        if [part for part in batch.parts if part.bitmask is not None]:
            bitmask = np.concatenate([self._bitmask(*lane, sizes) for lane in zip(lanes, places, strict=True)])
        if (stages := self.layout.num_stages) > 1:
            numbers = used, batch.passes, queued_stride(stages, used)
            schedule = RingSchedule(*map(np.int32, numbers))  # type: ignore[arg-type]  # numpy until it is sent
        rows = [(lane.rows, places_there) for lane, places_there in zip(lanes, places, strict=True)]
        inputs = PassInputs(
            _join([self._chunks(lane.chunks, sizes) for lane in lanes]) if sizes.chunks else None,
            _join([self._rows(*there, sizes) for there in rows]),
            bitmask,
            np.int32(batch.passes),
            np.concatenate([self._speculation_limits(*there, sizes) for there in rows]),
            schedule,
            pages,
        )
        return Command(sizes, inputs)

    def _copy_states(self, lanes: Sequence[Sequence[tuple[int, int]]]) -> Command:
        """The command that copies recurrent states in each lane. lanes: (source, target) rows."""

        def pack(copies: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
            source, target = zip(*copies, strict=True) if copies else ((), ())
            count = self.layout.engine.max_batch
            return _padded(source, count, -1), _padded(target, count, -1)

        return Command(CopyStates(), _join([pack(lane) for lane in lanes]))

    def _gathers(self, batch: Batch) -> list[Command]:
        """The commands that copy pages and snapshots for the host."""
        pages = [[page for page, _ in lane.stored] for lane in batch.lanes]
        commands, start = [], 0
        for count in self.buckets.moves_of(max(map(len, pages))):
            parts = [lane[start : start + count] for lane in pages]
            commands.append(Command(GatherPages(count=count), (_join([_padded(part, count, 0) for part in parts]),)))
            start += count
        for states in itertools.zip_longest(*[lane.stored_states for lane in batch.lanes]):
            rows = [0 if state is None else self._first_snapshot + state.place for state in states]
            commands.append(Command(GatherStates(), (np.array(rows, np.int32),)))
        return commands

    def _scatter_states(self, lanes: Sequence[RestoredState | None]) -> Command:
        """The command that puts a state from the host into a snapshot, at most one of each lane."""
        nowhere = self._first_snapshot + self.layout.num_snapshots
        rows = [nowhere if lane is None else self._first_snapshot + lane.snapshot for lane in lanes]
        like = next(lane.block for lane in lanes if lane)
        blocks = [jax.tree.map(np.zeros_like, like) if lane is None else lane.block for lane in lanes]
        # In each stage, the lanes one after the other.
        join = functools.partial(jax.tree.map, lambda *each: np.stack(each, axis=1).reshape(-1, *each[0].shape[2:]))
        return Command(ScatterStates(), (np.array(rows, np.int32), join(*blocks)))

    def _scatters(self, lanes: Sequence[Restored | None]) -> list[Command]:
        """The commands that put pages from the host into the cache, at most one sequence's of each lane."""
        commands, start = [], 0
        for count in self.buckets.moves_of(max([len(lane.pages) for lane in lanes if lane])):
            part = slice(start, start + count)
            pages = [_padded(lane.pages[part] if lane else [], count, -1) for lane in lanes]
            pages = [np.where(each < 0, self.layout.num_pages, each) for each in pages]
            commands.append(Command(ScatterPages(count=count), (_join(pages), _block(lanes, part))))
            start += count
        return commands

    # A lane

    def _copies(self, copies: Sequence[tuple[int, int]], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Pack source and target pages; padding copies to a page that does not exist."""
        source, target = np.zeros(count, np.int32), np.full(count, self.layout.num_pages, np.int32)
        for index, copy in enumerate(copies):
            source[index], target[index] = copy
        return source, target

    def _admissions(self, admissions: Sequence[Admission], count: int) -> tuple[np.ndarray, Slots]:
        """Pack slots, and what comes into them; padding has a slot that does not exist."""
        slot = np.full(count, self._nowhere + 1, np.int32)
        idle = [idle_options(len(self._processors))] * (count - len(admissions))
        requests = Slots(
            history=np.zeros((count, self.layout.engine.context), np.int32),  # type: ignore[arg-type]  # numpy until sent
            length=np.zeros(count, np.int32),  # type: ignore[arg-type]
            adapter=np.zeros(count, np.int32),  # type: ignore[arg-type]
            options=sampling_arrays([self._options(a) for a in admissions] + idle),
        )
        for row, admission in enumerate(admissions):
            length = len(admission.token_ids)
            requests.history[row, :length] = admission.token_ids
            requests.length[row] = length if admission.decodes else -length
            slot[row], requests.adapter[row] = admission.slot, admission.adapter_index
        return slot, requests

    def _options(self, admission: Admission) -> RowOptions:
        sequence, request = admission.sequence, admission.sequence.request
        if request.pooling:
            return idle_options(len(self._processors))
        chosen = tuple(name in request.sampling.logits_processors for name in self._processors)
        prompt, limit = sequence.num_prompt_tokens, sequence.max_length
        stops, words = request.stop_token_ids, request.bad_words
        return RowOptions(request.sampling, sequence.seed, prompt, limit, stops, chosen, words)

    def _chunks(self, chunks: Sequence[Chunk], sizes: Pass) -> Chunks:
        count, used = sizes.chunks, slice(len(chunks))
        slot = np.full(count, self._nowhere, np.int32)
        (start, tokens), (chooses, pooling) = np.zeros((2, count), np.int32), np.zeros((2, count), np.bool_)
        slot[used], start[used] = [chunk.slot for chunk in chunks], [chunk.start for chunk in chunks]
        tokens[used], chooses[used] = [chunk.count for chunk in chunks], [chunk.chooses for chunk in chunks]
        pooling[used] = [chunk.sequence.request.pooling for chunk in chunks]
        table = _page_table(chunks, count, sizes.pages, range(len(chunks)))
        return Chunks(slot, start, tokens, chooses, pooling, table)  # type: ignore[arg-type]

    def _rows(self, rows: Sequence[DecodeRow], places: Sequence[int], sizes: Pass) -> Rows:
        slot = np.full(sizes.batch, self._nowhere, np.int32)
        slot[list(places)] = [row.slot for row in rows]
        return Rows(slot, _page_table(rows, sizes.batch, sizes.pages, places))  # type: ignore[arg-type]

    def _bitmask(self, lane: Batch, places: Sequence[int], sizes: Pass) -> np.ndarray:
        """Pack the tokens that chunks and rows may choose."""
        bitmask = np.full(self.layout.bitmask(sizes.chunks + sizes.batch).shape, ALL_TOKENS, np.uint32)
        at = (*range(len(lane.chunks)), *(sizes.chunks + place for place in places))
        for row, part in zip(at, lane.parts, strict=True):
            if part.bitmask is not None:
                bitmask[row] = part.bitmask
        return bitmask

    def _speculation_limits(self, rows: Sequence[DecodeRow], places: Sequence[int], sizes: Pass) -> np.ndarray:
        limits = np.zeros(sizes.batch, np.int32)
        limits[list(places)] = [row.num_speculative_tokens for row in rows]
        return limits


def pass_sizes(batch: Batch, buckets: Buckets, stages: int = 1) -> tuple[Pass, int]:
    """The sizes of a batch's pass, the largest of all lanes, and how many micro-batches of it are not empty.

    stages: of the pipeline; 1: there is none.
    """
    chunks, rows = max([len(lane.chunks) for lane in batch.lanes]), max([len(lane.rows) for lane in batch.lanes])
    pages = round_up(max([len(part.pages) for part in batch.parts]), buckets.page_tables)
    speculative, padded = batch.num_speculative_tokens, round_up(chunks, (0, *buckets.chunks))
    if stages > 1 and chunks:
        sizes = prefill_sizes(stages, chunks=padded, rows_of_each=0, pages=pages)
        used = -(-chunks // (sizes.chunks // sizes.micro_batches))
        each = round_up(-(-rows // used), buckets.prefill_rows)
        return dataclasses.replace(sizes, batch=each * sizes.micro_batches), used
    rows_padded = round_up(rows, buckets.prefill_rows if chunks else buckets.decode_rows)
    if stages > 1:
        return decode_sizes(batch.micro_batches, rows_padded, speculative, pages), min(batch.micro_batches, rows)
    return Pass(chunks=padded, batch=rows_padded, speculative=speculative, pages=pages), 1


def _join[T](lanes: list[T]) -> T:
    """Put each lane's arrays one after the other, as `DeviceLayout` has them."""
    return lanes[0] if len(lanes) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *lanes)


def _padded(pages: Sequence[int], count: int, padding: int) -> np.ndarray:
    """The pages as int32 [count]."""
    padded = np.full(count, padding, np.int32)
    padded[: len(pages)] = pages
    return padded


def _block(lanes: Sequence[Restored | None], part: slice) -> PageBlock:
    """A part of the lanes' blocks, as programs take it: in each stage, the lanes one after the other."""
    known = next(lane.block for lane in lanes if lane)

    def join(like: np.ndarray, *each: np.ndarray | None) -> np.ndarray:
        shape = like.shape[0], part.stop - part.start, *like.shape[2:]
        if len(lanes) == 1:  # nearly always: nothing is copied
            return like[:, part].reshape(-1, *shape[2:])
        joined = np.zeros((shape[0], len(lanes), *shape[1:]), like.dtype)
        for index, given in enumerate(each):
            if given is not None:
                joined[:, index, : given[:, part].shape[1]] = given[:, part]
        return joined.reshape(-1, *shape[2:])

    blocks = [lane.block if lane else known.map(lambda _: None) for lane in lanes]
    return jax.tree.map(join, known, *blocks)


def _page_table(parts: Sequence[Chunk | DecodeRow], count: int, width: int, places: Sequence[int]) -> np.ndarray:
    table = np.zeros((count, width), np.int32)
    entries = memoryview(table.reshape(-1))  # assigned an array in half of the time that numpy takes
    for row, part in zip(places, parts, strict=True):
        entries[row * width : row * width + len(part.pages)] = part.pages
    return table


def pack_prompts(batch: Batch, buckets: EncoderBuckets) -> Command:
    """Pack the command that sends an encoder's prompts through it: tokens and positions, int32 [B, T]."""
    sequences = batch.sequences
    rows, width = round_up(len(sequences), buckets.rows), buckets.length(sequences[0])
    tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
    for row, sequence in enumerate(sequences):
        length = sequence.num_prompt_tokens
        tokens[row, :length], positions[row, :length] = sequence.token_ids, np.arange(length)
    return Command(EncoderSizes(batch=rows, tokens=width), (tokens, positions))
