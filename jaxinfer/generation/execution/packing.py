"""Packs a batch, padded to its buckets, into arrays on the host: the inputs of commands."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.generation.engine.batch import Admission, Batch, Chunk, DecodeRow
from jaxinfer.generation.engine.buckets import Buckets, EncoderBuckets, round_up
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs.admit import Admit
from jaxinfer.generation.execution.programs.copy_pages import CopyPages
from jaxinfer.generation.execution.programs.embed import EncoderSizes
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.place_adapter import PlaceAdapter
from jaxinfer.generation.execution.programs.prefill import Chunks
from jaxinfer.generation.execution.state import Rows, Slots
from jaxinfer.generation.sampling.arrays import RowOptions, idle_options, sampling_arrays

ALL_TOKENS = np.uint32(0xFFFFFFFF)


class PassInputs(NamedTuple):
    """The inputs of a decoder's pass, or of several over the same rows.

    Attributes:
      chunks: chunks of prompts; None: there are none.
      rows: requests that decode.
      bitmask: uint32 [M + B, V / 32], the tokens that may be chosen; None: all.
      passes: int32 [], how many passes.
      speculation_limits: int32 [B], how many speculative tokens each row may have in a pass.
    """

    chunks: Chunks | None
    rows: Rows
    bitmask: np.ndarray | None
    passes: np.int32
    speculation_limits: np.ndarray


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

    def changes(self, batch: Batch) -> list[Command]:
        """Return the commands that prepare the state for a batch: adapters come, pages are copied, slots are filled."""
        commands = [
            Command(PlaceAdapter(), (np.int32(index - 1), self.layout.adapter_layers(adapter)))
            for index, adapter in batch.adapter_uploads
        ]
        if batch.copies:
            source, target = self.copies(batch.copies)
            commands.append(Command(CopyPages(count=len(source)), (source, target)))
        if batch.admissions:
            slot, requests = self.admissions(batch.admissions)
            commands.append(Command(Admit(count=len(slot)), (slot, requests)))
        return commands

    def pass_through(self, batch: Batch) -> Command:
        """Return the command that sends chunks and rows through the model."""
        count, width = round_up(len(batch.chunks), (0, *self.buckets.chunks)), self.page_table_width(batch)
        size = round_up(len(batch.rows), self.buckets.prefill_rows if count else self.buckets.decode_rows)
        parts = [*batch.chunks, *[None] * (count - len(batch.chunks)), *batch.rows]
        inputs = PassInputs(
            self.chunks(batch.chunks, count, width) if count else None,
            self.rows(batch.rows, size, width),
            self.bitmask(parts, count + size),
            np.int32(batch.passes),
            self.speculation_limits(batch.rows, size),
        )
        return Command(Pass(chunks=count, batch=size, speculative=batch.num_speculative_tokens, pages=width), inputs)

    def copies(self, copies: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Pack source and target pages; padding copies to a page that does not exist."""
        count = round_up(len(copies), self.buckets.admissions)
        source, target = np.zeros(count, np.int32), np.full(count, self.layout.num_pages, np.int32)
        source[: len(copies)], target[: len(copies)] = zip(*copies, strict=True)
        return source, target

    def admissions(self, admissions: Sequence[Admission]) -> tuple[np.ndarray, Slots]:
        """Pack slots, and what comes into them; padding has a slot that does not exist."""
        count = round_up(len(admissions), self.buckets.admissions)
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

    def page_table_width(self, batch: Batch) -> int:
        """Return the pages of the longest page table, rounded up."""
        return round_up(max(len(part.pages) for part in batch.parts), self.buckets.page_tables)

    def chunks(self, chunks: Sequence[Chunk], count: int, width: int) -> Chunks:
        """Pack `count` chunks of prompts, with page tables of this width."""
        slot = np.full(count, self._nowhere, np.int32)
        (start, tokens), (chooses, pooling) = np.zeros((2, count), np.int32), np.zeros((2, count), np.bool_)
        for row, chunk in enumerate(chunks):
            slot[row], start[row], tokens[row] = chunk.slot, chunk.start, chunk.count
            chooses[row], pooling[row] = chunk.chooses, chunk.sequence.request.pooling
        table = _page_table(chunks, count, width)
        return Chunks(slot, start, tokens, chooses, pooling, table)  # type: ignore[arg-type]

    def rows(self, rows: Sequence[DecodeRow], count: int, width: int) -> Rows:
        """Pack `count` rows, with page tables of this width."""
        slot = np.full(count, self._nowhere, np.int32)
        slot[: len(rows)] = [row.slot for row in rows]
        return Rows(slot, _page_table(rows, count, width))  # type: ignore[arg-type]

    def bitmask(self, parts: Sequence[Chunk | DecodeRow | None], count: int) -> np.ndarray | None:
        """Pack the tokens that each row may choose; None while all may choose any."""
        if not any(part is not None and part.bitmask is not None for part in parts):
            return None
        bitmask = np.full(self.layout.bitmask(count).shape, ALL_TOKENS, np.uint32)
        for row, part in enumerate(parts):
            if part is not None and part.bitmask is not None:
                bitmask[row] = part.bitmask
        return bitmask

    def speculation_limits(self, rows: Sequence[DecodeRow], count: int) -> np.ndarray:
        """Pack how many speculative tokens each row may have in a pass."""
        limits = np.zeros(count, np.int32)
        limits[: len(rows)] = [row.num_speculative_tokens for row in rows]
        return limits


def _page_table(parts: Sequence[Chunk | DecodeRow], count: int, width: int) -> np.ndarray:
    table = np.zeros((count, width), np.int32)
    for row, part in enumerate(parts):
        table[row, : len(part.pages)] = part.pages
    return table


def pack_prompts(batch: Batch, buckets: EncoderBuckets) -> Command:
    """Return the command that sends an encoder's prompts through it: tokens and positions, int32 [B, T]."""
    sequences = batch.sequences
    rows, width = round_up(len(sequences), buckets.rows), buckets.length(sequences[0])
    tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
    for row, sequence in enumerate(sequences):
        length = sequence.num_prompt_tokens
        tokens[row, :length], positions[row, :length] = sequence.token_ids, np.arange(length)
    return Command(EncoderSizes(batch=rows, tokens=width), (tokens, positions))
