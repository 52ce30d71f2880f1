"""The demo model as other engines read it: a Hugging Face Llama in float32, from which `peers/make_gguf.py` goes on."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxinfer import checkpoints
from jaxinfer.models import DecoderConfig
from jaxinfer.models.files.description import Description


def export_llama(model: Path, out: Path) -> None:
    """Write a Llama-like model directory as Hugging Face files: config, weights in float32, tokenizer.

    Raises ValueError for a model that is none, or has biases.
    """
    config = Description.read(model).config
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{model} is no decoder.")
    leaves = {name: np.asarray(array, np.float32) for name, array in checkpoints.load(model).items()}
    tensors = {"model.embed_tokens.weight": leaves.pop("embed.table")}
    tensors["model.norm.weight"] = leaves.pop("final_norm.scale")
    if not config.tied:
        tensors["lm_head.weight"] = leaves.pop("head.weight")
    for layer in range(config.layers):
        tensors |= _layer(config, f"layers.{layer}", leaves)
    if leaves:
        raise ValueError(f"{model}: Llama has no {', '.join(leaves)}.")
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(_config(config), indent=1))
    shutil.copy(model / "tokenizer.json", out)


def _config(config: DecoderConfig) -> dict[str, object]:
    attention = config.attention
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.q_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": config.positions.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": 0,
    }


def _layer(config: DecoderConfig, layer: str, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Take a layer's leaves, and return its tensors: as `models/families/llama.py` reads them."""
    attention, embed = config.attention, config.embed
    group = attention.q_heads // attention.kv_heads
    heads = leaves.pop(f"{layer}.attention.qkv.weight").reshape(attention.kv_heads, group + 2, -1, embed)
    gate_up = leaves.pop(f"{layer}.mlp.gate_up.weight")
    parts = {
        "input_layernorm": leaves.pop(f"{layer}.attention_norm.scale"),
        "self_attn.q_proj": heads[:, :group].reshape(-1, embed),
        "self_attn.k_proj": heads[:, group].reshape(-1, embed),
        "self_attn.v_proj": heads[:, group + 1].reshape(-1, embed),
        "self_attn.o_proj": leaves.pop(f"{layer}.attention.out.weight"),
        "post_attention_layernorm": leaves.pop(f"{layer}.mlp_norm.scale"),
        "mlp.gate_proj": gate_up[0::2],
        "mlp.up_proj": gate_up[1::2],
        "mlp.down_proj": leaves.pop(f"{layer}.mlp.down.weight"),
    }
    return {f"model.{layer}.{name}.weight": np.ascontiguousarray(part) for name, part in parts.items()}
