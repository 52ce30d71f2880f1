"""What the parent tells its workers, and what a worker tells its parent. Imports no JAX."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from benchmarks.gpu.rows import Rows

LOST_CONTEXT = 71
"""The exit status of a worker that has reported an error after which its calls to the GPU may all fail."""
FAULTS = ("abort", "illegal-address", "hang")
"""What an item can suffer on purpose, as on a GPU: a C++ check that fails, a wrong access, a kernel that never ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A run's settings, as all its processes know them.

    Attributes:
      folder: the results.
      work: files that are deleted after the run.
      dry: whether it runs on a CPU, with tiny shapes.
      peer_python: the interpreter that has torch and transformers.
      faults: what goes wrong on purpose, by item: {"numerics.1": "abort"}.
    """

    folder: str
    work: str
    dry: bool
    peer_python: str
    faults: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def dumps(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Self:
        """Read the settings from JSON."""
        return cls(**json.loads(text))

    @property
    def rows(self) -> Rows:
        """The rows of the run."""
        return Rows(Path(self.folder) / "rows.jsonl")

    @property
    def progress(self) -> Path:
        """The file in which a worker says where it is."""
        return Path(self.work) / "progress.json"


class Progress(NamedTuple):
    """Where a worker is.

    titles: of all items of its stage. current: the index of the item that runs.
    """

    titles: tuple[str, ...]
    current: int

    def write(self, file: Path) -> None:
        """Replace the file at once."""
        temporary = file.with_suffix(".new")
        temporary.write_text(json.dumps(self))
        temporary.replace(file)

    @classmethod
    def read(cls, file: Path) -> "Progress | None":
        """Read the file; None: no item has begun."""
        if not file.exists():
            return None
        titles, current = json.loads(file.read_text())
        return cls(tuple(titles), current)
