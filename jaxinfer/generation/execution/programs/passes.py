"""`Pass`: the sizes of a pass, from which those of its programs follow, whichever they are."""

import dataclasses
from typing import Self

from jaxinfer.compiled import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass(Sizes):
    """Sizes that the programs of a pass share.

    Attributes:
      chunks: chunks of prompts; 0 in a decode step.
      batch: decoding rows.
      speculative: speculative tokens of each row.
      pages: pages of a page table.
    """

    chunks: int
    batch: int
    speculative: int
    pages: int

    @classmethod
    def for_pass(cls, sizes: "Pass") -> Self:
        """A program's sizes in a pass of these sizes."""
        return cls(chunks=sizes.chunks, batch=sizes.batch, speculative=sizes.speculative, pages=sizes.pages)

    def places(self, rows: int, micro_batches: int = 1) -> range | list[int]:
        """Return where so many rows are among the padded ones; micro_batches: those that are not empty."""
        return range(rows)

    def tokens(self, chunk_size: int) -> int:
        """The number of its tokens, padding included."""
        return self.chunks * chunk_size + self.batch * (1 + self.speculative)
