"""A GGUF file as if it were a Hugging Face directory: fields of `config.json`, tensors by their names there.

Undoes what llama.cpp's converter does to tensors, so that the families map them as they map all others.
"""

import os
from typing import Any

import numpy as np

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.gguf_file import GgufFile
from jaxinfer.checkpoints.huggingface import TensorInfo
from jaxinfer.models.families import Shape
from jaxinfer.models.files import gguf_tokenizer
from jaxinfer.models.files.gguf_config import (
    ROPE_FACTORS,
    architecture_of,
    config_fields,
    generation_fields,
)

QUANTIZED = "bfloat16"
"""The dtype that quantised matrices are stored in."""


class GgufModel:
    """The model in a GGUF file, of which no tensor is read before it is asked for.

    Attributes:
      tensors: by their names in Hugging Face's checkpoints; the dtype is the one to store them in.
      fields: of its `config.json`.
      generation: the fields of its `generation_config.json`.
      files: of its tokenizer, by name; none if the file has none.

    Raises CheckpointError for what is not implemented, by name, and for a damaged file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = file = GgufFile(path)
        factors = file.read(ROPE_FACTORS) if ROPE_FACTORS in file.tensors else None
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        try:
            architecture = architecture_of(file.metadata)
            self.fields: dict[str, Any] = config_fields(file.metadata, shapes, factors)
            self.fields |= gguf_tokenizer.token_ids(file.metadata)
            self.generation = generation_fields(file.metadata)
            self.files = gguf_tokenizer.tokenizer_files(file.metadata, self.fields["vocab_size"])
            names = {architecture.tensor_name(name): name for name in shapes if name != ROPE_FACTORS}
            names = _of_experts(names, shapes)
        except ValueError as error:
            raise CheckpointError(f"{file.path}: {error}") from error
        self._names, self._architecture = names, architecture
        self.tensors = {
            theirs: TensorInfo(
                file.path, name, _shape(theirs, shapes[name], expert), _stored_dtype(file.tensors[name].type.name)
            )
            for theirs, (name, expert) in names.items()
        }

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """Read one tensor as Hugging Face's checkpoint has it: floats as they are stored, others as float32."""
        tensor, architecture = self._file.read(*self._names[name]), self._architecture
        if architecture.norm_offset and name.endswith("norm.weight"):
            return tensor.astype(np.float32) - architecture.norm_offset
        if architecture.rotates_pairs and ".q_proj." in name:
            return _pairs_apart(tensor, self.fields["num_attention_heads"])
        if architecture.rotates_pairs and ".k_proj." in name:
            return _pairs_apart(tensor, self.fields["num_key_value_heads"])
        return tensor.reshape(self.tensors[name].shape)


def _of_experts(names: dict[str, str], shapes: dict[str, Shape]) -> dict[str, tuple[str, int | None]]:
    """The tensor of each name in Hugging Face's checkpoints, and which expert's matrix of it; None: the whole."""
    tensors: dict[str, tuple[str, int | None]] = {}
    for theirs, name in names.items():
        if "{}" not in theirs:
            tensors[theirs] = name, None
            continue
        if len(shapes[name]) != 3:
            raise ValueError(f"{name} is {list(shapes[name])}, not a matrix for each expert; fetch the file again.")
        tensors |= {theirs.format(expert): (name, expert) for expert in range(shapes[name][0])}
    return tensors


def _shape(theirs: str, stored: Shape, expert: int | None) -> Shape:
    """The shape of a tensor in Hugging Face's checkpoints; llama.cpp may leave out that a gate has one row."""
    if expert is not None:
        return stored[1:]
    return (1, *stored) if theirs.endswith("shared_expert_gate.weight") and len(stored) == 1 else stored


def _stored_dtype(type_: str) -> str:
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(type_, QUANTIZED)


def _pairs_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of queries or keys with those of a pair half a head apart; in GGUF's Llama they are neighbours."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
