"""What every part of the benchmark is given."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.workers import find_peers, make_models


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      quick: fewer rounds, requests and steps.
      folder: of the peers' model, in every engine's format.
      demo: a trained model directory, whose text is predictable.
      peer_python: interpreter with the peers, or None for the default.
      threads: of the peers.
    """

    quick: bool
    folder: Path
    demo: Path
    peer_python: Path | None
    threads: int

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    def random_model(self) -> Path:
        """The peers' model in our format, written if it does not exist."""
        model = self.folder / "jaxinfer"
        if not model.exists():
            make_models(self.folder, find_peers(self.peer_python))
        return model
