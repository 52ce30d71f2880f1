"""Reading a Hugging Face directory: JSON files, and tensors one at a time out of safetensors files.

Only the caller owns a tensor's memory: no file stays mapped between two reads, so tensors that have been dropped do
not count against the process.
"""

import dataclasses
import os
import pathlib
from typing import Any

import ml_dtypes  # noqa: F401  (safetensors returns bfloat16 through it)
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.paths import inside

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_CONVERT_PICKLE = (
    "reading a pickle (.pt, .pth, .ckpt) runs the code in it, so save its state dict where torch is: "
    "safetensors.torch.save_file(model.state_dict(), 'model.safetensors'); of a checkpoint of Lightning, "
    "torch.load(FILE)['state_dict']"
)
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
      file: where it is.
      name: its name there.
      shape: its shape.
      dtype: numpy's name, or that of safetensors if we cannot read it.
    """

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class SafetensorsFolder:
    """The tensors of a directory, in one file or in shards with an index, or of one file that is named itself.

    Opening reads only the headers, and checks that each file has the length that its header says.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        for file, expected in _shards(self.path).items():
            header = _read_header(file)
            if missing := sorted(expected - header.keys()):
                raise CheckpointError(f"{file}: lacks {', '.join(missing)}, which {INDEX} lists; fetch it again.")
            # Also of a file that has more, such as an old copy of a tensor: the index says which one counts.
            self.tensors |= {name: header[name] for name in expected} if expected else header

    def add(self, prefix: str, folder: str) -> None:
        """Add the tensors of a module in a folder inside, with a prefix to their names."""
        if not (file := inside(self.path, f"{folder}/{SINGLE}")).is_file():
            raise CheckpointError(
                f"{file}: no such file; if there is a pytorch_model.bin, save the model again in safetensors with "
                "SentenceTransformer(DIR).save(DIR)."
            )
        header = _read_header(file)
        self.tensors |= {f"{prefix}{name}": tensor for name, tensor in header.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Read a copy of one tensor, or of one index of its first dimension."""
        tensor = self.tensors[name]
        if tensor.dtype not in _DTYPES.values():
            raise CheckpointError(
                f"{tensor.file}: {name} has dtype {tensor.dtype}, which is not implemented; "
                f"save the model in one of {', '.join(_DTYPES.values())}."
            )
        with _opened(tensor.file) as file:
            return file.get_tensor(tensor.name) if index is None else file.get_slice(tensor.name)[index]


def read_json(path: pathlib.Path, *, required: bool = False) -> dict[str, Any]:
    """Read the object in a JSON file; empty if an optional file does not exist."""
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path}: no such file; a Hugging Face directory needs it.")
        return {}
    return _decoded(path, dict[str, Any], "a JSON object")


def read_json_list(path: pathlib.Path) -> list[dict[str, Any]] | None:
    """Read the objects in a JSON file; None if it does not exist."""
    return _decoded(path, list[dict[str, Any]], "a JSON list of objects") if path.is_file() else None


def _decoded[T](path: pathlib.Path, kind: type[T], called: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not {called} ({error}); fetch it again.") from error


def read_index(path: pathlib.Path) -> dict[str, set[str]]:
    """Read the names of the tensors in each file that the index of a directory lists."""
    try:
        weight_map = msgspec.convert(read_json(path / INDEX, required=True).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path / INDEX}: weight_map: {error}; fetch it again.") from error
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, set()).add(name)
    return names


def _shards(path: pathlib.Path) -> dict[pathlib.Path, set[str]]:
    """Each safetensors file, and the names that the index expects in it."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path}: not a safetensors file; {_CONVERT_PICKLE}.")
        return {path: set()}
    if (path / SINGLE).is_file():
        return {path / SINGLE: set()}
    if (path / INDEX).is_file():
        shards = {inside(path, file): names for file, names in read_index(path).items()}
        if missing := sorted(file.name for file in shards if not file.is_file()):
            raise CheckpointError(f"{path}: {INDEX} names files that are missing: {', '.join(missing)}; fetch them.")
        return shards
    if others := sorted(file.name for file in path.glob("*.safetensors")):
        if len(others) == 1:
            return {path / others[0]: set()}
        raise CheckpointError(f"{path}: {len(others)} safetensors files but no {INDEX}; fetch the index too.")
    remedy = "fetch it"
    if list(path.glob("*.bin")):
        remedy = "this is a PyTorch checkpoint: save it with save_pretrained(..., safe_serialization=True)"
    elif any(file.suffix in (".pt", ".pth", ".ckpt") for file in path.iterdir()):
        remedy = _CONVERT_PICKLE
    raise CheckpointError(f"{path}: no {SINGLE} and no {INDEX}; {remedy}.")


def _read_header(path: pathlib.Path) -> dict[str, TensorInfo]:
    tensors = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            view = file.get_slice(name)
            dtype = str(view.get_dtype())
            tensors[name] = TensorInfo(path, name, tuple(view.get_shape()), _DTYPES.get(dtype, dtype))
    return tensors


def _opened(path: pathlib.Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: truncated or corrupt ({error}); fetch it again.") from error
