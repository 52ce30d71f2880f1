"""Folders in PEFT's layout, for tests: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Pair = tuple[np.ndarray, np.ndarray]  # A [r, inputs], B [outputs, r]

# A few fields as PEFT 0.19 writes them besides those that matter.
WRITTEN_BY_PEFT = {
    "alora_invocation_tokens": None,
    "base_model_name_or_path": "someone/model",
    "eva_config": None,
    "inference_mode": True,
    "layer_replication": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_version": "0.19.1",
    "qalora_group_size": 16,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
}


def random_pair(outputs: int, inputs: int, rank: int, rng: np.random.Generator) -> Pair:
    """Matrices far from zero, so that what they change shows."""
    a, b = rng.normal(0, 0.5, (rank, inputs)), rng.normal(0, 0.5, (outputs, rank))
    return a.astype(np.float32), b.astype(np.float32)


def save_adapter(folder: Path, pairs: Mapping[str, Pair], **config: object) -> Path:
    """Write an adapter.

    Args:
      pairs: module as its model calls it ("model.layers.0.self_attn.q_proj") -> A and B.
      config: fields of `adapter_config.json`; r is the rank of the first pair unless given, lora_alpha is 8.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(next(iter(pairs.values()))[0])
    fields = WRITTEN_BY_PEFT | {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted({module.rpartition(".")[2] for module in pairs}),
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
