"""The settings of all parts of the benchmark, and the models that they serve."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import ROOT
from benchmarks.workers import PEERS, EngineError, find_peers, make_models


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      quick: a smoke test: few tokens, the demo model in place of the random one, no peers.
      rounds: how often each server is started and measured; figures are medians.
      folder: folder of the peers' model, in every server's format.
      demo: a trained model directory.
      peer_python: interpreter with the peers, or None for the default.
      vllm_python: interpreter with vLLM.
      threads: number of threads of the peers.
    """

    quick: bool
    rounds: int
    folder: Path
    demo: Path
    peer_python: Path | None
    vllm_python: Path
    threads: int

    @property
    def hf(self) -> Path:
        """The peers' model in Hugging Face's format, written by `model`."""
        return self.folder / "served-hf"

    @property
    def gguf(self) -> Path:
        """The peers' model in GGUF, written by `model`."""
        return self.folder / "served.gguf"

    def model(self) -> Path:
        """The peers' model in our format, written if it does not exist; the demo model for a smoke test."""
        if self.quick:
            return self.demo
        model = self.folder / "served-jaxinfer"
        if not model.exists():
            if not self.gguf.exists():
                python = find_peers(self.peer_python)
                make_models(self.folder, python)
                if status := subprocess.run([python, PEERS / "make_served_model.py", self.folder]).returncode:
                    raise EngineError(f"make_served_model.py ended with status {status}; see above.")
            command = [sys.executable, "-m", "jaxinfer", "convert", self.hf, model]
            subprocess.run(command, check=True, cwd=ROOT)
        return model
