"""The settings of all parts of the benchmark, and the models that they serve."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.report import ROOT
from benchmarks.serving.settings import Settings as ServingSettings

NAMES = ("a", "b", "c")
FEWER_LAYERS = {"a": 0, "b": 1, "c": 2}
"""How many layers each model lacks, where they are to have three configs."""


class Settings(NamedTuple):
    """Options of the command.

    Attributes:
      serving: those of `benchmarks.serving`, whose model the others are made of.
      seconds: how long each load lasts.
    """

    serving: ServingSettings
    seconds: float

    def models(self, configs: str) -> dict[str, Path]:
        """Three models of one config ("one"), or of three ("three"), in our format; written unless they exist."""
        folder = self.serving.folder / f"several-{configs}"
        return {name: _model(self.serving, folder, name, configs) for name in NAMES}

    def gguf(self) -> dict[str, Path]:
        """Three files of the peers' model."""
        self.serving.model()
        files = {name: self.serving.folder / "several-gguf" / f"{name}.gguf" for name in NAMES}
        for file in files.values():
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                subprocess.run(["cp", self.serving.gguf, file], check=True)
        return files


def _model(settings: ServingSettings, folder: Path, name: str, configs: str) -> Path:
    model = folder / name
    if model.exists():
        return model
    settings.model()
    source, made = settings.hf, folder / f"{name}-hf"
    made.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (made / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_bytes())
    config["num_hidden_layers"] -= FEWER_LAYERS[name] if configs == "three" else 0
    (made / "config.json").write_text(json.dumps(config))
    kept = {
        key: array
        for key, array in load_file(source / "model.safetensors").items()
        if not key.startswith("model.layers.") or int(key.split(".")[2]) < config["num_hidden_layers"]
    }
    kept["model.norm.weight"] = kept["model.norm.weight"] * np.float32(1 + 0.01 * NAMES.index(name))
    save_file(kept, made / "model.safetensors", metadata={"format": "pt"})
    subprocess.run([sys.executable, "-m", "jaxinfer", "convert", made, model], check=True, cwd=ROOT)
    (made / "model.safetensors").unlink()
    return model
