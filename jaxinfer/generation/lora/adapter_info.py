"""`adapter_config.json` of a LoRA adapter, as PEFT writes it; anything but plain LoRA is refused."""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.huggingface import read_json

CONFIG = "adapter_config.json"

# Fields that say what the adapter is and how it was trained: they do not change what it computes.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors say it
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("ensure_weight_tying", "megatron_core", "qalora_group_size"),
    }
)
# Initial values that leave the model's weights unchanged; others (pissa, olora, corda, loftq, ...) change them.
_KEEPS_THE_MODEL = (True, False, None, "gaussian", "eva", "orthogonal")

_Rank = Annotated[int, msgspec.Meta(ge=1)]


class _AdapterConfigFile(msgspec.Struct, kw_only=True):
    """The fields of `adapter_config.json` that decide what an adapter computes."""

    peft_type: str
    r: _Rank
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    fan_in_fan_out: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """The content of an adapter's `adapter_config.json`.

    Attributes:
      folder: the adapter.
      rank: the largest of `base_rank` and the ranks in `rank_pattern`.
      base_rank: the rank of every module that no pattern matches.
      alpha: the alpha of every module that no pattern matches.
      rank_pattern: regular expression of the end of a module's name -> its rank; the first match counts.
      alpha_pattern: the same for alpha.
      rank_stabilized: deltas are scaled by alpha / sqrt(rank) (arXiv:2312.03732), otherwise by alpha / rank.
      fan_in_fan_out: the adapted model stores its weights [inputs, outputs] (GPT-2).
    """

    folder: pathlib.Path
    base_rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    fan_in_fan_out: bool

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "AdapterInfo":
        """Read only `adapter_config.json`. Raises CheckpointError for anything but plain LoRA."""
        file = pathlib.Path(folder) / CONFIG
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file; name a folder that PEFT's save_pretrained wrote.")
        fields = read_json(file)
        try:
            config = msgspec.convert(fields, _AdapterConfigFile)
            for pattern in (*(config.rank_pattern or {}), *(config.alpha_pattern or {})):
                re.compile(pattern)
        except (msgspec.ValidationError, re.error) as error:
            raise CheckpointError(f"{file}: {error}; save the adapter with PEFT again.") from error
        _require_plain_lora(file, config, fields)
        return cls(
            folder=file.parent,
            base_rank=config.r,
            alpha=config.lora_alpha,
            rank_pattern=config.rank_pattern or {},
            alpha_pattern=config.alpha_pattern or {},
            rank_stabilized=config.use_rslora,
            fan_in_fan_out=config.fan_in_fan_out,
        )

    @property
    def rank(self) -> int:
        return max((self.base_rank, *self.rank_pattern.values()))

    def rank_of(self, module: str) -> int:
        """The rank of one module, by its name in the adapted model."""
        return _first_match(self.rank_pattern, module, self.base_rank)

    def scale_of(self, module: str) -> float:
        """The factor of one module's delta."""
        alpha, rank = _first_match(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def require_rank(self, max_rank: int) -> None:
        """Raise CheckpointError if the adapter has a higher rank than is reserved."""
        if self.rank > max_rank:
            raise CheckpointError(
                f"{self.folder / CONFIG}: rank {self.rank} is more than the {max_rank} that are reserved; "
                f"raise max_lora_rank to {self.rank}."
            )


def _require_plain_lora(file: pathlib.Path, config: _AdapterConfigFile, fields: Mapping[str, object]) -> None:
    """Refuse every field that asks for more than x A^T B^T, including fields of later PEFT versions."""
    choices = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": _KEEPS_THE_MODEL}
    for name, supported in choices.items():
        if (value := getattr(config, name)) not in supported:
            raise CheckpointError(
                f"{file}: {name}={value!r} is not implemented, only {', '.join(map(repr, supported))}; "
                "train the adapter with one of these."
            )
    known = _WITHOUT_EFFECT.union(config.__struct_fields__)
    if active := sorted(name for name, value in fields.items() if value and name not in known):
        described = ", ".join(f"{name}={fields[name]!r}" for name in active)
        raise CheckpointError(f"{file}: {described} is not implemented; train the adapter without it.")


def _first_match[T](patterns: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that matches a module's name, or the end of it after a dot."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
