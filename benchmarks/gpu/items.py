"""What a stage measures, one item after another, and where it writes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.rows import Rows
from benchmarks.gpu.timing import DRY, FULL, Effort


class Item(NamedTuple):
    """One measurement, which writes its rows. It may fail without harm to the others."""

    title: str
    run: Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a stage writes, and how it measures.

    Attributes:
      folder: the results.
      dry: whether it runs on a CPU, with tiny shapes.
      peer_python: the interpreter that has torch and transformers.
    """

    rows: Rows
    folder: Path
    dry: bool
    peer_python: Path

    @property
    def effort(self) -> Effort:
        """How much is measured."""
        return DRY if self.dry else FULL
