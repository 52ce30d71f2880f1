"""What other implementations computed from the goldens: one file beside their folders, in it NAME/TENSOR of each."""

import pathlib
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = "expected.safetensors"


def read_expected(golden: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the tensors of one golden by name."""
    tensors, prefix = load_file(golden.parent / FILE), f"{golden.name}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def write_expected(golden: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Replace the tensors of one golden."""
    file, prefix = golden.parent / FILE, f"{golden.name}/"
    others = load_file(file) if file.exists() else {}
    kept = {name: tensor for name, tensor in others.items() if not name.startswith(prefix)}
    save_file(kept | {prefix + name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file)
