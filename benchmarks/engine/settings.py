"""What every part of the benchmark is given."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.engine.ways import Memory
from benchmarks.workers import find_peers, make_models


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      quick: fewer requests, rounds and steps.
      rounds: of every engine's throughput.
      folder: of the peers' model, in every engine's format.
      demo: a trained model directory, whose text is predictable.
      peer_python: interpreter with the peers, or None for the default.
      threads: of the peers.
      search: try all ways of the peers anew.
      memory: how fast the peers' ways were in former runs.
    """

    quick: bool
    rounds: int
    folder: Path
    demo: Path
    peer_python: Path | None
    threads: int
    search: bool
    memory: Memory

    def random_model(self) -> Path:
        """The peers' model in our format, written if it does not exist."""
        model = self.folder / "jaxinfer"
        if not model.exists():
            make_models(self.folder, find_peers(self.peer_python))
        return model
