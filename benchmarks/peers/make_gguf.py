"""Conversion of Hugging Face's float32 Llama to GGUF, a tensor at a time: `make_gguf.py HF_DIR FILE.gguf`."""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import json
import pathlib
import sys

import gguf
import numpy as np
import safetensors.numpy
from make_model import interleaved


def main(folder, file):
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    index = folder / "model.safetensors.index.json"
    parts = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    files = list(dict.fromkeys(parts))
    for part in files:
        for name, tensor in safetensors.numpy.load_file(folder / part).items():
            known = names.get_name(name, try_suffixes=(".weight",))
            assert known is not None, name
            writer.add_tensor_info(known, tensor.shape, tensor.dtype, tensor.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for part in files:
        for name, tensor in safetensors.numpy.load_file(folder / part).items():
            if name.endswith("q_proj.weight"):
                tensor = interleaved(tensor, heads)
            if name.endswith("k_proj.weight"):
                tensor = interleaved(tensor, kv_heads)
            writer.write_tensor_data(np.ascontiguousarray(tensor))
    writer.close()


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
