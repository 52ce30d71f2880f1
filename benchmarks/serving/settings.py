"""The settings of all parts of the benchmark."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.workers import find_peers, make_models


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      quick: a smoke test: few tokens, the demo model in place of the random one, no peers.
      rounds: how often each server is started and measured; figures are medians.
      folder: folder of the peers' model, in every server's format.
      demo: a trained model directory.
      peer_python: interpreter with the peers, or None for the default.
      threads: number of threads of the peers.
    """

    quick: bool
    rounds: int
    folder: Path
    demo: Path
    peer_python: Path | None
    threads: int

    def model(self) -> Path:
        """The peers' model in our format, written if it does not exist; the demo model for a smoke test."""
        if self.quick:
            return self.demo
        if not (model := self.folder / "jaxinfer").exists():
            make_models(self.folder, find_peers(self.peer_python))
        return model
