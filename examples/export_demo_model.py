"""Write the demo model in a format of other programs: a Hugging Face folder, or a GGUF file.

    python examples/export_demo_model.py demo_hf
    python examples/export_demo_model.py demo.gguf

The folder is a Llama in float32. The file has its matrices in Q8_0. GGUF has no name for the way that the demo model's
tokenizer splits texts. The file names the one of Llama 3, which differs only in letters after an apostrophe.
"""

import argparse
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from jaxinfer import checkpoints
from jaxinfer.models import DecoderConfig
from jaxinfer.models.files.description import Description

DEMO = Path(__file__).parent / "demo_model"


def export_llama(model: Path, out: Path) -> None:
    """Write a Llama-like model directory as Hugging Face files: config, weights in float32, tokenizer.

    Raises ValueError for a model that is none, or has biases.
    """
    config, tensors = read_llama(model)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(_config(config), indent=1))
    shutil.copy(model / "tokenizer.json", out)


def export_gguf(model: Path, file: Path) -> None:
    """Write a Llama-like model directory as a GGUF file. Errors are those of `export_llama`."""
    config, tensors = read_llama(model)
    attention = config.layer(0).attention
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.embed)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.layer(0).mlp.hidden)
    writer.add_head_count(attention.q_heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(attention.positions.theta)
    _add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.layers)
    heads = {"q_proj": attention.q_heads, "k_proj": attention.kv_heads}
    for name, tensor in tensors.items():
        if (projection := name.split(".")[-2]) in heads:  # rotated pairs are neighbours in GGUF
            shape = heads[projection], 2, attention.head_dim // 2, config.embed
            tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None, name
        writer.add_tensor(known, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_llama(model: Path) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """Read the config of a model directory, and its weights in float32 by Llama's names in `transformers`."""
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
    return config, tensors


def _config(config: DecoderConfig) -> dict[str, object]:
    attention = config.layer(0).attention
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.layer(0).mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.q_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": attention.positions.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": 0,
    }


def _layer(config: DecoderConfig, layer: str, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Take a layer's leaves, and return its tensors: as `models/families/llama.py` reads them."""
    attention, embed = config.layer(0).attention, config.embed
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


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict) -> None:
    """Add a byte-level BPE, from its `tokenizer.json`; its special token ends a text."""
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = tokenizer["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(sorted(tokens, key=tokens.__getitem__))
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if id_ in special else kinds.NORMAL for id_ in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder, or a file that ends in .gguf")
    out = parser.parse_args().out
    if out.suffix == ".gguf":
        export_gguf(DEMO, out)
    else:
        export_llama(DEMO, out)


if __name__ == "__main__":
    main()
