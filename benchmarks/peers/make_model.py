"""Write a random Llama in every peer's format: `make_model.py OUT_DIR`.

OUT_DIR will contain `hf/` (config, safetensors, a tokenizer whose tokens are t0, t1, ...), `ct2-float32/`, `ct2-int8/`,
and `f32.gguf`, `bf16.gguf`, `q8_0.gguf`.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import pathlib
import sys

import ctranslate2
import gguf
import numpy as np
import tokenizers
import torch
import transformers

SIZES = {
    "num_hidden_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}


def write_hf(folder):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(SIZES["vocab_size"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2"
    ).save_pretrained(folder)
    return model


def interleaved(weight, heads):
    """Reorder rows of a query or key matrix for llama.cpp's rotary embedding: a pair is two adjacent rows.

    In Hugging Face's order it is one row of each half.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(file, model, kind):
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        weight = tensor.float().numpy()
        if name.endswith("q_proj.weight"):
            weight = interleaved(weight, config.num_attention_heads)
        if name.endswith("k_proj.weight"):
            weight = interleaved(weight, config.num_key_value_heads)
        matrix = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(weight), matrix)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(out):
    transformers.utils.logging.disable_progress_bar()
    out.mkdir(parents=True)
    hf = out / "hf"
    model = write_hf(hf)
    for kind in (None, "int8"):
        converter = ctranslate2.converters.TransformersConverter(str(hf))
        converter.convert(str(out / f"ct2-{kind or 'float32'}"), quantization=kind)
    types = gguf.GGMLQuantizationType
    for name, kind in (("f32", types.F32), ("bf16", types.BF16), ("q8_0", types.Q8_0)):
        write_gguf(out / f"{name}.gguf", model, kind)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
