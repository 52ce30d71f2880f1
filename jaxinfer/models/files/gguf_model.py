"""A GGUF file as if it were a Hugging Face directory: fields of `config.json`, tensors by their names there.

Undoes what llama.cpp's converter does to tensors, so that the families map them as they map all others.
"""

import os
from collections import defaultdict
from typing import Any

import numpy as np

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.gguf_file import GgufFile
from jaxinfer.checkpoints.huggingface import TensorInfo
from jaxinfer.models.families import Shape
from jaxinfer.models.files import gguf_tokenizer
from jaxinfer.models.files.gguf_config import (
    EXPERTS_GATE_UP,
    ROPE_FACTORS,
    architecture_of,
    config_fields,
    generation_fields,
    is_needed,
)
from jaxinfer.models.files.gguf_delta_rule import DeltaRuleTensors

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
            names = defaultdict[str, tuple[str, ...]](tuple)
            for name in sorted(name for name in shapes if is_needed(file.metadata, name)):
                names[architecture.tensor_name(name)] += (name,)
            self._names = names
        except ValueError as error:
            raise CheckpointError(f"{file.path}: {error}") from error
        self._architecture = architecture
        self._delta_rules = DeltaRuleTensors.from_fields(self.fields) if architecture.has_delta_rules else None
        self.tensors = {theirs: self._describe(theirs, stored) for theirs, stored in names.items()}

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Read one tensor, or one index of its first dimension, as Hugging Face's checkpoint has it.

        Floats come as they are stored, others as float32.
        """
        tensor, *joined = (self._file.read(each, index) for each in self._names[name])
        architecture, rules = self._architecture, self._delta_rules
        if ".experts." in name:
            return np.concatenate((tensor, *joined), axis=-2)
        if rules and joined:
            return rules.by_key_head(tensor, *joined)
        if rules and ".linear_attn." in name:
            return rules.restore(name, tensor).reshape(self.tensors[name].shape)
        if architecture.norm_offset and name.endswith("norm.weight"):
            return tensor.astype(np.float32) - architecture.norm_offset
        if architecture.rotates_pairs and ".q_proj." in name:
            return _pairs_apart(tensor, self.fields["num_attention_heads"])
        if architecture.rotates_pairs and ".k_proj." in name:
            return _pairs_apart(tensor, self.fields["num_key_value_heads"])
        return tensor.reshape(self.tensors[name].shape)

    def _describe(self, theirs: str, stored: tuple[str, ...]) -> TensorInfo:
        """Describe a tensor of Hugging Face's checkpoints that is made of stored ones, whose rows are joined."""
        tensors = [self._file.tensors[name] for name in stored]
        shape = _shape(theirs, tensors[0].shape)
        if len(tensors) > 1:
            shapes = [tensor.shape if EXPERTS_GATE_UP in theirs else tensor.shape[1:] for tensor in tensors]
            if len(shape) < 2 or len(set(shapes)) > 1:
                both = " and ".join(f"{name} {list(self._file.tensors[name].shape)}" for name in stored)
                raise CheckpointError(f"{self._file.path}: {both} do not fit together; fetch the file again.")
            shape = (*shape[:-2], sum(tensor.shape[-2] for tensor in tensors), shape[-1])
        return TensorInfo(tensors[0].file, stored[0], shape, _stored_dtype(tensors[0].type.name))


def _shape(theirs: str, stored: Shape) -> Shape:
    """The shape of a tensor in Hugging Face's checkpoints; llama.cpp may leave out that a dimension is 1."""
    if theirs.endswith("shared_expert_gate.weight") and len(stored) == 1:
        return (1, *stored)
    return (stored[0], 1, *stored[1:]) if theirs.endswith("conv1d.weight") and len(stored) == 2 else stored


def _stored_dtype(type_: str) -> str:
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(type_, QUANTIZED)


def _pairs_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of queries or keys with those of a pair half a head apart; in GGUF's Llama they are neighbours."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
