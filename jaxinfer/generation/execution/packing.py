"""Packs a batch, padded to its buckets, into arrays on the host: the arguments of programs."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.generation.engine.batch import Admission, Batch, Chunk, DecodeRow
from jaxinfer.generation.engine.buckets import Buckets, round_up
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs.prefill import Chunks
from jaxinfer.generation.execution.state import Rows, Slots
from jaxinfer.generation.sampling.arrays import RowOptions, idle_options, sampling_arrays

ALL_TOKENS = np.uint32(0xFFFFFFFF)


class Packer:
    """Makes the arguments of a decoder's programs.

    Args:
      layout: the shapes on the device.
      buckets: the sizes that programs are compiled for.
      processors: the names of the logits processors, in the layout's order.
    """

    def __init__(self, layout: DeviceLayout, buckets: Buckets, processors: Iterable[str]):
        self.layout, self.buckets, self._processors = layout, buckets, tuple(processors)
        self._nowhere = layout.engine.max_batch  # a slot that no request has

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
