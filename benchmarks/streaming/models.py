"""A random Llama larger than the memory it may take, written file by file, in every engine's format."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.report import ROOT

SIZES = {
    "num_hidden_layers": 64,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 3754,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
"""Sizes of 64 layers of 128 MiB in float32, and an embedding of 64 MiB, which is the head too."""
QUICK = {"num_hidden_layers": 8}


def write_hf(folder: Path, others: Mapping[str, int] | None = None) -> None:
    """Write a Hugging Face directory, a file a layer. others: sizes in place of those of `SIZES`."""
    sizes = SIZES | dict(others or {})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **sizes,
    }
    folder.mkdir(parents=True)
    files = {}
    for file, tensors in _tensors(sizes):
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def _tensors(sizes: dict[str, int]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    rng, width, hidden = np.random.default_rng(0), sizes["hidden_size"], sizes["intermediate_size"]
    head = width // sizes["num_attention_heads"]
    kv = head * sizes["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 0.02, (rows, columns)).astype(np.float32)

    ones = np.ones(width, np.float32)
    shapes = {"q": (width, width), "k": (kv, width), "v": (kv, width), "o": (width, width)}
    mlp = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}self_attn.{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": matrix(*shape) for name, shape in mlp.items()}
        tensors |= {f"{prefix}{norm}_layernorm.weight": ones for norm in ("input", "post_attention")}
        yield f"layer-{layer}.safetensors", tensors
    table = {"model.embed_tokens.weight": matrix(sizes["vocab_size"], width), "model.norm.weight": ones}
    yield "rest.safetensors", table


def write_gguf(hf: Path, file: Path, peer_python: Path) -> None:
    """Convert the model for llama.cpp."""
    subprocess.run([peer_python, ROOT / "benchmarks/peers/make_gguf.py", hf, file], check=True)
