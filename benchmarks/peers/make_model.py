"""Write a random model in every peer's format: `make_model.py OUT_DIR MODEL`, a name of `MODELS`.

OUT_DIR will contain `hf/` (config, safetensors, a tokenizer whose tokens are t0, t1, ...), `ct2-float32/`, `ct2-int8/`,
and `f32.gguf`, `bf16.gguf`, `q8_0.gguf`. A mixture of experts has no `ct2-*`, since CTranslate2 has none, and no bf16.
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

MODELS = {
    "llama-213m": transformers.LlamaConfig(
        num_hidden_layers=16,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=2816,
        vocab_size=32_000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": transformers.Qwen3Config(
        num_hidden_layers=28,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
    ),
    "gemma3-1b": transformers.Gemma3TextConfig(
        num_hidden_layers=26,
        hidden_size=1152,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=6912,
        vocab_size=262_144,
        max_position_embeddings=32_768,
        sliding_window=512,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)],
    ),
    "qwen3-moe-690m": transformers.Qwen3MoeConfig(
        num_hidden_layers=8,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=384,
        norm_topk_prob=True,  # as llama.cpp takes for granted
        intermediate_size=3072,
        vocab_size=32_000,
        max_position_embeddings=2048,
    ),
}
"""Shapes: a small Llama of our own, and those of two published models."""


def write_hf(folder, config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(config.vocab_size)}
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


ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3, "gemma3_text": gguf.MODEL_ARCH.GEMMA3}
ARCHITECTURES["qwen3_moe"] = gguf.MODEL_ARCH.QWEN3MOE


def apart(state):
    """Yield tensors by name, with gates and ups of all experts apart, as GGUF has them."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            gates, ups = tensor.chunk(2, dim=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gates
            yield name.replace("gate_up_proj", "up_proj.weight"), ups
        else:
            yield name if name.endswith((".weight", ".bias")) else f"{name}.weight", tensor


def write_gguf(file, model, kind):
    config, family = model.config, model.config.model_type
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])  # llama.cpp knows that of local layers
    if family == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, tensor in apart(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        if family == "llama" and name.endswith("q_proj.weight"):
            weight = interleaved(weight, config.num_attention_heads)
        if family == "llama" and name.endswith("k_proj.weight"):
            weight = interleaved(weight, config.num_key_value_heads)
        if family == "gemma3_text" and weight.ndim == 1:
            weight = 1 + weight  # Gemma multiplies by it
        is_router = name.endswith("mlp.gate.weight")
        matrix = kind if weight.ndim > 1 and not is_router else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(weight), matrix)
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None, name
        writer.add_tensor(known, data, raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(out, name):
    transformers.utils.logging.disable_progress_bar()
    out.mkdir(parents=True)
    hf = out / "hf"
    model = write_hf(hf, MODELS[name])
    types = gguf.GGMLQuantizationType
    if model.config.model_type == "qwen3_moe":
        write_gguf(out / "f32.gguf", model, types.F32)
        write_gguf(out / "q8_0.gguf", model, types.Q8_0)
        return
    for kind in (None, "int8"):
        converter = ctranslate2.converters.TransformersConverter(str(hf))
        converter.convert(str(out / f"ct2-{kind or 'float32'}"), quantization=kind)
    for name, kind in (("f32", types.F32), ("bf16", types.BF16), ("q8_0", types.Q8_0)):
        write_gguf(out / f"{name}.gguf", model, kind)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
