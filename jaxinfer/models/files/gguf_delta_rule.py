"""Gated delta rules in GGUF files: what llama.cpp's converter does to their tensors, undone.

Pure: arrays in, arrays out, with the names of Hugging Face's checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class DeltaRuleTensors:
    """The tensors of a model's delta rules (`linear_attn.*`).

    Attributes:
      key_heads, value_heads, key_dim, value_dim: as in `DeltaRuleConfig`.
      in_turn: whether value heads go through the key heads in turn. Otherwise those of a key head stand together, as in
        Hugging Face's checkpoints.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    in_turn: bool

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "DeltaRuleTensors":
        """The tensors of a model with these fields of a `config.json`; Qwen3-Next's value heads are not in turn."""
        return cls(
            key_heads=fields["linear_num_key_heads"],
            value_heads=fields["linear_num_value_heads"],
            key_dim=fields["linear_key_head_dim"],
            value_dim=fields["linear_value_head_dim"],
            in_turn=fields["model_type"] != "qwen3_next",
        )

    def restore(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Undo what the converter did to a tensor; its name is that in Hugging Face's checkpoint."""
        part, keys = name.rpartition("linear_attn.")[2], 2 * self.key_heads * self.key_dim
        match part:
            case "A_log":
                return np.log(-self._together(tensor))
            case "in_proj_qkv.weight" | "conv1d.weight":
                return np.concatenate((tensor[:keys], self._together(tensor[keys:])))
            case "out_proj.weight":
                return self._together(tensor.T).T
            case "dt_bias" | "in_proj_z.weight" | "in_proj_a.weight" | "in_proj_b.weight":
                return self._together(tensor)
            case _:
                return tensor

    def by_key_head(self, z: np.ndarray, qkv: np.ndarray) -> np.ndarray:
        """Join the rows of all gates, and of all queries, keys and values, to each key head's: Qwen3-Next's matrix."""
        keys = self.key_heads * self.key_dim
        parts = (*np.split(qkv, (keys, 2 * keys)), z)
        heads = [part.reshape(self.key_heads, -1, part.shape[-1]) for part in parts]
        return np.concatenate(heads, axis=1).reshape(-1, qkv.shape[-1])

    def _together(self, values: np.ndarray) -> np.ndarray:
        """Put value heads, which the first axis begins with, in the order of Hugging Face's checkpoints."""
        if not self.in_turn:
            return values
        heads = values.reshape(self.value_heads // self.key_heads, self.key_heads, -1, *values.shape[1:])
        return heads.swapaxes(0, 1).reshape(values.shape)
