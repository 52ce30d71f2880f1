"""The settings of all parts of the benchmark."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.engine.ways import Memory
from benchmarks.workers import find_peers, make_models


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      quick: fewer requests, rounds and steps.
      rounds: number of rounds of every engine's throughput.
      folder: folder of the peers' model, in every engine's format.
      demo: a trained model directory, whose text is predictable.
      peer_python: interpreter with the peers, or None for the default.
      threads: number of threads of the peers.
      search: whether to try all ways of the peers again.
      memory: the times of the peers' ways in former runs.
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
