"""The sizes that programs are compiled for; a step is padded to the next larger one."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Sizes

from jaxinfer.generation.engine.config import EncoderEngineConfig, EngineConfig
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.sizes import powers, round_up

SMALLEST_PAGE_TABLE = 8
SMALLEST_LENGTH = 16
MICRO_BATCHES_PER_STAGE = 4
"""Most micro-batches of a prefill step for each stage of a pipeline: with as many at most a fifth of the time is idle,
and products of matrices are as large as that allows (DeepSpeed Inference, Fig. 3)."""


def chunks_per_micro_batch(chunks: int, stages: int) -> int:
    """Return how many chunks each micro-batch of a prefill step has, of so many in all."""
    return -(-chunks // (MICRO_BATCHES_PER_STAGE * stages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes of a decoder's programs, ascending.

    Attributes:
      admissions: requests admitted, or pages copied, at once.
      chunks: chunks of prompts in a prefill step.
      prefill_rows: decoding rows beside chunks; few sizes, since a row costs little there.
      decode_rows: rows of a decode step.
      page_tables: pages of a row's page table.
      moves: pages that one program copies to the host's memory or from it; none: no tier keeps pages.
      max_padding: the chunks of a step, rounded up, are at most this many times the real ones.
    """

    admissions: tuple[int, ...]
    chunks: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    decode_rows: tuple[int, ...]
    page_tables: tuple[int, ...]
    moves: tuple[int, ...] = ()
    max_padding: float = 1.25

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        max_padding: float = 1.25,
        short_page_tables: bool = False,
        moves: tuple[int, ...] = (),
    ) -> "Buckets":
        """Make an engine's buckets; `short_page_tables` adds page tables shorter than the context's."""
        slots, pages = config.max_batch, config.pages_per_sequence
        return cls(
            admissions=powers(8, 1, slots),
            chunks=powers(4, 1, max(1, config.token_budget // config.chunk_size)),
            prefill_rows=(0, *powers(4, min(8, slots), slots)),
            decode_rows=tuple(sorted({*powers(2, 1, slots), *powers(2, 24, slots)})),
            page_tables=powers(2, min(SMALLEST_PAGE_TABLE, pages), pages) if short_page_tables else (pages,),
            moves=moves,
            max_padding=max_padding,
        )

    def full_chunks(self, count: int) -> int:
        """Return how many of `count` chunks to take, so that a step is not mostly padding."""
        if count == 0 or count >= self.chunks[-1]:
            return min(count, self.chunks[-1])
        if round_up(count, self.chunks) <= self.max_padding * count:
            return count
        return max(size for size in self.chunks if size <= count)

    def moves_of(self, pages: int) -> list[int]:
        """Return the sizes of the programs that copy so many pages, one after the other."""
        if not pages:
            return []
        full, rest = divmod(pages, self.moves[-1])
        return [self.moves[-1]] * full + ([round_up(rest, self.moves)] if rest else [])

    def for_stages(self, stages: int) -> "Buckets":
        """The buckets of a pipeline: its steps run no micro-batch that is empty, so padding costs nothing.

        Where numbers of chunks make the same micro-batches, only the largest is kept.
        """
        sizes = {chunks_per_micro_batch(count, stages): count for count in self.chunks}
        return dataclasses.replace(self, chunks=tuple(sizes.values()), max_padding=math.inf)

    @property
    def largest(self) -> "Buckets":
        """The last bucket of each kind."""
        sizes = {f.name: getattr(self, f.name)[-1:] for f in dataclasses.fields(self) if f.name != "max_padding"}
        return dataclasses.replace(self, **sizes)

    def reachable(
        self, sequences: Sizes[Sequence], config: EngineConfig, *, num_pages: int, lanes: int = 1
    ) -> "Buckets":
        """The buckets that may be needed while these sequences come and go, on a cache of `num_pages` a lane."""

        def pages(tokens: int) -> int:
            return -(-tokens // config.page_size)

        count = min(config.max_batch, len(sequences))
        longest = max(s.request.max_cached_tokens for s in sequences)
        first, last = (
            round_up(pages(n), self.page_tables) for n in (min(s.num_prompt_tokens for s in sequences), longest)
        )
        # A prompt's last chunk gives the first token.
        decodes = any(s.max_length > s.num_prompt_tokens + 1 for s in sequences)
        if count * pages(longest) <= num_pages:  # no sequence is preempted and computed again
            longest = max(s.num_prompt_tokens for s in sequences)
        beside = count - 1 if lanes == 1 else min(config.max_batch, len(sequences) - 1)  # chunks may be another lane's
        return dataclasses.replace(
            self,
            admissions=_up_to(count, self.admissions),
            chunks=_up_to(count * -(-longest // config.chunk_size), self.chunks),
            prefill_rows=_up_to(beside, self.prefill_rows) if decodes else (0,),
            decode_rows=_up_to(count, self.decode_rows) if decodes else (),
            page_tables=tuple(size for size in self.page_tables if first <= size <= last),
        )


def _up_to(size: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The ascending sizes up to the first that holds `size`; all if none does."""
    return sizes[: next((i for i, candidate in enumerate(sizes) if candidate >= size), len(sizes)) + 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderBuckets:
    """The sizes of an encoder's programs: rows of one padded length.

    Attributes:
      lengths: tokens of a row, ascending.
      rows: rows of a batch, ascending; each lane has an equal part of them.
      token_budget: how many tokens a batch may have, padding included.
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    token_budget: int

    @classmethod
    def from_config(cls, config: EncoderEngineConfig, lanes: int = 1) -> "EncoderBuckets":
        """Make an engine's buckets, of which each lane takes what it would alone."""
        return cls(
            lengths=powers(4, min(SMALLEST_LENGTH, config.context), config.context),
            rows=tuple(lanes * rows for rows in powers(2, 1, config.max_batch)),
            token_budget=lanes * config.token_budget,
        )

    def length(self, sequence: Sequence) -> int:
        """The length of the row that a prompt is padded to."""
        return round_up(sequence.num_prompt_tokens, self.lengths)

    def max_rows(self, length: int) -> int:
        """Return how many rows of this length a batch has at most."""
        return min(self.rows[-1], max(self.rows[0], self.token_budget // length))

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Every (rows, length) that a batch can be padded to."""
        return {
            (round_up(count, self.rows), length)
            for length in self.lengths
            for count in range(1, self.max_rows(length) + 1)
        }

    def reachable(self, sequences: Iterable[Sequence]) -> set[tuple[int, int]]:
        """The shapes that these sequences, queued together, need: full batches of each length, and the rest."""
        shapes = set()
        for length, count in Counter(map(self.length, sequences)).items():
            full = self.max_rows(length)
            shapes |= {(round_up(rows, self.rows), length) for rows in {min(count, full), count % full} - {0}}
        return shapes
