"""The settings of all parts of the benchmark."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.streaming.models import QUICK, write_hf
from benchmarks.workers import find_peers
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import open_model
from jaxinfer.streaming.layer_folders import write_layer_files


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      quick: smaller models, one round.
      folder: where models are written.
      demo: a trained model directory, whose text is predictable.
      peer_python: interpreter with the peers, or None for the default.
    """

    quick: bool
    folder: Path
    demo: Path
    peer_python: Path | None

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    @property
    def python(self) -> Path:
        """The peers' interpreter. Raises EngineError if there is none."""
        return find_peers(self.peer_python)

    def large_hf(self) -> Path:
        """The large model as a Hugging Face directory, written if it does not exist."""
        folder = self.folder / "hf"
        if not folder.exists():
            write_hf(folder, QUICK if self.quick else None)
        return folder

    def large_model(self) -> Path:
        """The large model in our format with its layer files, written if it does not exist."""
        folder = self.folder / "model"
        if not folder.exists():
            convert(self.large_hf(), folder)
            write_layer_files(open_model(folder), folder)
        return folder
