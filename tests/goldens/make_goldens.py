"""Makes the goldens: tiny random models of every family, with what `transformers` computes from them.

Runs in an environment of its own, never in the tests:

    python3.11 -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch transformers==5.23.0 safetensors
    /tmp/goldens/bin/python tests/goldens/make_goldens.py [NAME ...]

Each golden is a directory beside this file with `config.json` and `model.safetensors`. In the `expected.safetensors` of
all of them it has `tokens` (and for encoders `token_types`), int32 [B, T] filled with zeros behind `lengths` [B], and
`logits` (decoders) or `hidden` (encoders), float32 [sum of lengths, V or D]. Every row is run by itself, so nothing of
ours depends on how `transformers` treats padding. One decoder also has `beams.json`: `SEARCHES` after each of its rows,
with the token ids and scores of all beams, best first.
"""

import json
import pathlib
import re
import shutil
import sys
from collections.abc import Callable

import torch
import transformers
from expected import write_expected
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
LENGTHS = (21, 9, 1)
SEARCHES = [
    {"num_beams": beams, "length_penalty": penalty, "early_stopping": early, "eos_token_id": ends, "max_new_tokens": 12}
    for beams, penalty, early, ends in (
        (4, 1.0, False, [13]),
        (4, 1.0, True, [13]),
        (4, 0.0, False, [13]),
        (4, 2.0, False, [13]),
        (3, -1.0, True, [13]),
        (2, 0.5, False, [7, 13, 39]),
        (5, 1.0, True, [7, 13, 39]),
        (10, 1.0, False, [39, 7]),
        (10, 1.0, False, None),
    )
]

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 64, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 24}
GPT_NEO = {"vocab_size": 64, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "max_position_embeddings": 24}
NEOX = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}
OPT = {
    "vocab_size": 64,
    "hidden_size": 24,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 24,
    "word_embed_proj_dim": 24,
}
BERT = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 24,
}
FALCON = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
DISTILBERT = {"vocab_size": 64, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 3, "max_position_embeddings": 24}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
SEEING = {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 4, "patch_size": 2}}
LATER_NAMES = (
    ("language_model.lm_head", "lm_head"),
    ("language_model.model", "model.language_model"),
    ("vision_tower", "model.vision_tower"),
    ("multi_modal_projector", "model.multi_modal_projector"),
)
GEMMA_SEEING = {
    "vision_config": VISION | {"model_type": "siglip_vision_model", "image_size": 4, "patch_size": 2},
    "mm_tokens_per_image": 4,
}
GEMMA_4 = {"hidden_size_per_layer_input": 0}
GEMMA_4_SEEING = {
    "vision_config": VISION
    | {"model_type": "gemma4_vision", "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2}
    | {"position_embedding_size": 4}
}
SEES = {"class": "Mistral3ForConditionalGeneration"}
QWEN_SEEING = {
    "vision_config": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2}
    | {"out_hidden_size": 24, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
}
QWEN_AXES = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500_000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
QWEN_2_5_SEEING = {
    "vision_config": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2}
    | {"out_hidden_size": 24, "fullatt_block_indexes": [0]}
}
QWEN_2_5_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [1, 1, 1]}}
CWM_IDS = {"bos_token_id": 0, "eos_token_id": 1}
QWEN_DELTA = {
    "max_position_embeddings": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "rope_parameters": QWEN_AXES["rope_parameters"] | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]},
}
QWEN_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 3}
DEEPSEEK_EXPERTS = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
NUMBERED_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}
TEMPERED = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    }
}
NO_MLP = {name: value for name, value in LLAMA.items() if name != "intermediate_size"}
LONG = {"lengths": (64, 9, 1)}  # an expert that is chosen wrongly may show late
NEW_FUSED = LONG | {"bf16": True, "fused": True}
FUSED = NEW_FUSED | {"legacy": True}


def rope(kind: str, **fields: float) -> dict:
    """Rotary parameters as transformers 5 writes them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **fields}}


# name -> (fields of its config, options: bf16 weights, names without this prefix, config in transformers 4's spelling,
# beam searches, lengths of the rows, one tensor for all experts, the fields of the text part beside the others, one
# width of all full attention)
GOLDENS: dict[str, tuple[dict, dict]] = {
    "gpt2_tied": (GPT2, {"strip": "transformer."}),
    "gpt2_awkward": (
        GPT2 | {"vocab_size": 53, "n_inner": 37, "scale_attn_weights": False, "tie_word_embeddings": False},
        {"bf16": True},
    ),
    "gpt_neo_alternating": (GPT_NEO | {"attention_types": [[["global", "local"], 1]], "window_size": 5}, {}),
    "gpt_neo_awkward": (
        GPT_NEO
        | {
            "vocab_size": 53,
            "num_layers": 3,
            "attention_types": [[["local"], 2], [["global"], 1]],
            "window_size": 3,
            "intermediate_size": 29,
            "tie_word_embeddings": False,
        },
        {"bf16": True},
    ),
    "gptj_partial": (GPT2 | {"rotary_dim": 4}, {}),
    "gptj_awkward": (
        GPT2 | {"rotary_dim": 6, "vocab_size": 53, "n_inner": 37, "activation_function": "relu"},
        {"bf16": True},
    ),
    "gpt_neox_parallel": (NEOX | rope("default", partial_rotary_factor=0.25), {}),
    "gpt_neox_sequential": (
        NEOX
        | rope("linear", factor=2.5, partial_rotary_factor=0.5)
        | {"vocab_size": 53, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
        {"bf16": True, "legacy": True},
    ),
    "opt_tied": (OPT, {"strip": "model."}),
    "opt_awkward": (
        OPT | {"vocab_size": 53, "enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
        {"bf16": True},
    ),
    "bloom_tied": ({"vocab_size": 64, "hidden_size": 24, "n_layer": 2, "n_head": 4}, {"strip": "transformer."}),
    "bloom_six_heads": (
        {"vocab_size": 53, "hidden_size": 24, "n_layer": 2, "n_head": 6, "tie_word_embeddings": False},
        {"bf16": True},
    ),
    "llama_llama3": (
        LLAMA
        | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
        {"beams": True},
    ),
    "llama_linear": (
        LLAMA
        | rope("linear", factor=4.0)
        | {"vocab_size": 53, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"bf16": True, "legacy": True},
    ),
    "llama_yarn": (
        LLAMA
        | rope("yarn", factor=4.0, original_max_position_embeddings=2048, beta_fast=4.0, beta_slow=0.5)
        | {
            "vocab_size": 53,
            "max_position_embeddings": 8192,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "hidden_act": "gelu",
        },
        {"bf16": True},
    ),
    "mistral_window": (LLAMA | {"sliding_window": 5}, {}),
    "mistral_full": (
        LLAMA | {"sliding_window": None, "vocab_size": 53, "head_dim": 10, "num_key_value_heads": 1},
        {"bf16": True, "legacy": True},
    ),
    "qwen2_tied": (LLAMA | {"tie_word_embeddings": True}, {}),
    "qwen2_window": (
        LLAMA | {"vocab_size": 53, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"bf16": True},
    ),
    "qwen3_wide_heads": (LLAMA | {"head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}, {}),
    "qwen3_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
        {"bf16": True},
    ),
    "gemma2_window": (
        LLAMA | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        {},
    ),
    "gemma2_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_hidden_layers": 3,
            "sliding_window": 3,
            "query_pre_attn_scalar": 13,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 3.0,
        },
        {"bf16": True, "legacy": True},
    ),
    "phi3_window": (LLAMA | {"sliding_window": 5, "pad_token_id": 0}, {}),
    "phi3_partial": (
        LLAMA
        | rope("default", partial_rotary_factor=0.75)
        | {"vocab_size": 53, "hidden_size": 32, "num_key_value_heads": 1, "pad_token_id": 0},
        {"bf16": True},
    ),
    "bert_pooled": (BERT, {}),
    "bert_awkward": (
        BERT | {"vocab_size": 53, "intermediate_size": 37, "type_vocab_size": 3, "hidden_act": "gelu_new"},
        {
            "bf16": True,
            "class": "BertForMaskedLM",
            "rename": (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
        },
    ),
    "distilbert_plain": (DISTILBERT, {}),
    "distilbert_awkward": (
        DISTILBERT | {"vocab_size": 53, "hidden_dim": 37, "activation": "relu", "sinusoidal_pos_embds": True},
        {"bf16": True, "class": "DistilBertForMaskedLM"},
    ),
    "roberta_plain": (BERT | {"type_vocab_size": 1, "max_position_embeddings": 26}, {}),
    "roberta_awkward": (
        BERT | {"vocab_size": 53, "pad_token_id": 3, "max_position_embeddings": 28, "intermediate_size": 37},
        {"bf16": True, "class": "RobertaForMaskedLM"},
    ),
    "gpt2_inverse_layers": (
        GPT2 | {"n_layer": 3, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        {},
    ),
    "opt_projected": (OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}, {}),
    "opt_projected_awkward": (
        OPT
        | {
            "vocab_size": 53,
            "word_embed_proj_dim": 10,
            "_remove_final_layer_norm": True,
            "enable_bias": False,
            "tie_word_embeddings": False,
        },
        {"bf16": True},
    ),
    "opt_plain_norms": (
        OPT
        | {
            "vocab_size": 53,
            "layer_norm_elementwise_affine": False,
            "enable_bias": False,
            "activation_function": "gelu",
        },
        {"bf16": True},
    ),
    "phi_parallel": (LLAMA | {"hidden_size": 32, "num_key_value_heads": None}, {}),
    "phi_awkward": (
        LLAMA
        | rope("default", partial_rotary_factor=0.4)
        | {"vocab_size": 53, "hidden_size": 40, "hidden_act": "gelu", "qk_layernorm": True},
        {"bf16": True, "legacy": True},
    ),
    "starcoder2_tied": (LLAMA, {}),
    "starcoder2_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "hidden_size": 20,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "use_bias": False,
            "tie_word_embeddings": False,
        },
        {"bf16": True, "legacy": True},
    ),
    "falcon_two_norms": (FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, {}),
    "falcon_one_norm": (
        FALCON
        | rope("linear", factor=2.0)
        | {
            "vocab_size": 53,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 1,
            "ffn_hidden_size": 37,
            "activation": "gelu_new",
            "tie_word_embeddings": False,
        },
        {"bf16": True, "legacy": True},
    ),
    "falcon_multi_query": (FALCON, {}),
    "falcon_alibi": (
        FALCON
        | {
            "vocab_size": 53,
            "hidden_size": 36,
            "num_attention_heads": 6,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
        },
        {"bf16": True},
    ),
    "glm_half_rotated": (LLAMA | {"head_dim": 8}, {}),
    "glm_awkward": (
        LLAMA
        | rope("linear", factor=2.0, partial_rotary_factor=0.5)
        | {
            "vocab_size": 53,
            "head_dim": 12,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "glm4_sandwich": (LLAMA | {"head_dim": 8, "attention_bias": False}, {}),
    "glm4_awkward": (
        LLAMA
        | rope("default", partial_rotary_factor=0.3)
        | {"vocab_size": 53, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "hidden_act": "gelu"},
        {"bf16": True, "legacy": True},
    ),
    "stablelm_sequential": (LLAMA | {"hidden_size": 32, "num_key_value_heads": 4, "use_qkv_bias": True}, {}),
    "stablelm_awkward": (
        LLAMA
        | rope("default", partial_rotary_factor=0.4)
        | {
            "vocab_size": 53,
            "hidden_size": 40,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "tie_word_embeddings": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "mistral3_text": ({"text_config": LLAMA | {"model_type": "mistral", "sliding_window": 5}} | SEEING, SEES),
    "mistral3_awkward": (
        {
            "text_config": LLAMA
            | {"vocab_size": 53, "head_dim": 10, "num_key_value_heads": 1, "sliding_window": None}
            | {"model_type": "mistral"},
            "tie_word_embeddings": False,
        }
        | SEEING,
        SEES | {"bf16": True, "rename": LATER_NAMES},
    ),
    "gemma3_text_window": (
        LLAMA
        | {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        {},
    ),
    "gemma3_text_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_hidden_layers": 7,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "sliding_window": 3,
            "query_pre_attn_scalar": 13,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"bf16": True, "legacy": True},
    ),
    "olmo2_plain": (LLAMA, {}),
    "olmo2_awkward": (
        LLAMA
        | rope("yarn", factor=4.0, original_max_position_embeddings=16)
        | {"vocab_size": 53, "num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": True},
        {"bf16": True, "legacy": True},
    ),
    "olmo3_window": (
        LLAMA
        | {
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                    "attention_factor": 1.2,
                    "rope_theta": 500_000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
        {},
    ),
    "olmo3_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "granite_plain": (
        LLAMA
        | {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "granite_awkward": (
        LLAMA
        | rope("dynamic", factor=4.0)
        | {
            "vocab_size": 53,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.5,
        },
        {"bf16": True, "legacy": True},
    ),
    "smollm3_plain": (LLAMA | {"num_hidden_layers": 5}, {}),
    "smollm3_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 4,
            "no_rope_layers": [0, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        {"bf16": True, "legacy": True},
    ),
    "cohere_plain": (LLAMA | {"logit_scale": 0.5}, {}),
    "cohere_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "logit_scale": 3.0,
        },
        {"bf16": True, "legacy": True},
    ),
    "cohere2_window": (LLAMA | {"num_hidden_layers": 5, "sliding_window": 5, "logit_scale": 0.5}, {}),
    "cohere2_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 3,
            "logit_scale": 1.0,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"bf16": True, "legacy": True},
    ),
    "phi3_longrope": (
        LLAMA
        | rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.3],
            long_factor=[1.0, 4.0, 16.0],
            original_max_position_embeddings=8,
        )
        | {"original_max_position_embeddings": 8, "pad_token_id": 0, "tie_word_embeddings": True},
        {"bf16": True},
    ),
    "phi3_shortrope": (
        LLAMA
        | rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.3],
            long_factor=[1.0, 4.0, 16.0],
            original_max_position_embeddings=64,
        )
        | {"original_max_position_embeddings": 64, "pad_token_id": 0, "hidden_size": 32},
        {},
    ),
    "gemma3_sees": (
        {
            "text_config": LLAMA
            | {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 5, "model_type": "gemma3_text"}
        }
        | GEMMA_SEEING,
        {"class": "Gemma3ForConditionalGeneration"},
    ),
    "gemma3_awkward": (
        {
            "text_config": LLAMA
            | {"vocab_size": 53, "num_key_value_heads": 1, "head_dim": 12, "sliding_window": 3}
            | {"model_type": "gemma3_text"}
        }
        | GEMMA_SEEING,
        {"class": "Gemma3ForConditionalGeneration", "bf16": True, "rename": LATER_NAMES},
    ),
    "mixtral_plain": (LLAMA | {"intermediate_size": 12, "num_local_experts": 4}, LONG),
    "mixtral_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "intermediate_size": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "qwen2_moe_plain": (LLAMA | QWEN_EXPERTS | {"shared_expert_intermediate_size": 12}, LONG),
    "qwen2_moe_awkward": (
        LLAMA
        | QWEN_EXPERTS
        | {
            "vocab_size": 53,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 7,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "qwen3_moe_plain": (LLAMA | QWEN_EXPERTS | {"head_dim": 8, "norm_topk_prob": True}, LONG),
    "qwen3_moe_awkward": (
        LLAMA
        | QWEN_EXPERTS
        | {
            "vocab_size": 53,
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_experts_per_tok": 1,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "olmoe_plain": (LLAMA | {"intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 2}, LONG),
    "olmoe_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 10,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "granitemoe_plain": (
        LLAMA
        | {
            "intermediate_size": 8,
            "num_local_experts": 6,
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "tie_word_embeddings": True,
        },
        LONG,
    ),
    "granitemoe_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "residual_multiplier": 0.7,
            "attention_bias": True,
        },
        FUSED,
    ),
    "granitemoeshared_plain": (
        LLAMA | {"intermediate_size": 8, "num_local_experts": 4, "shared_intermediate_size": 12},
        LONG,
    ),
    "granitemoeshared_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "intermediate_size": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "residual_multiplier": 0.5,
            "shared_intermediate_size": 0,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "glm4_moe_plain": (LLAMA | DEEPSEEK_EXPERTS | {"head_dim": 8, "attention_bias": True}, LONG),
    "glm4_moe_awkward": (
        LLAMA
        | DEEPSEEK_EXPERTS
        | {
            "vocab_size": 53,
            "use_qk_norm": True,
            "head_dim": 12,
            "num_key_value_heads": 1,
            "first_k_dense_replace": 0,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.5,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "dots1_plain": (LLAMA | DEEPSEEK_EXPERTS | {"norm_topk_prob": True, "routed_scaling_factor": 2.5}, LONG),
    "dots1_awkward": (
        LLAMA
        | DEEPSEEK_EXPERTS
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "attention_bias": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "seed_oss_plain": (LLAMA | {"head_dim": 8}, {}),
    "seed_oss_awkward": (
        LLAMA
        | rope("linear", factor=2.0)
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "ernie4_5_plain": (LLAMA | {"head_dim": 8}, {}),
    "ernie4_5_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
        {"bf16": True, "legacy": True},
    ),
    "gemma_plain": (LLAMA | {"head_dim": 8, "num_key_value_heads": 4}, {}),
    "gemma_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"bf16": True, "legacy": True},
    ),
    "exaone4_plain": (LLAMA | {"sliding_window": None, "layer_types": ["full_attention"] * 2}, {}),
    "exaone4_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        {"bf16": True},
    ),
    "ministral_plain": (LLAMA | {"head_dim": 8, "sliding_window": 5}, {}),
    "ministral_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
        {"bf16": True},
    ),
    "qwen3_vl_plain": (
        {"text_config": LLAMA | {"head_dim": 8, "num_key_value_heads": 4} | QWEN_AXES} | QWEN_SEEING,
        {"class": "Qwen3VLForConditionalGeneration"},
    ),
    "qwen3_vl_awkward": (
        {
            "text_config": LLAMA
            | {"vocab_size": 53, "head_dim": 10, "num_key_value_heads": 1, "attention_bias": True}
            | QWEN_AXES,
            "tie_word_embeddings": True,
        }
        | QWEN_SEEING,
        {"class": "Qwen3VLForConditionalGeneration", "bf16": True},
    ),
    "minimax_m2_plain": (
        LLAMA | {"head_dim": 8, "intermediate_size": 8, "num_local_experts": 6, "num_experts_per_tok": 3},
        LONG,
    ),
    "minimax_m2_awkward": (
        LLAMA
        | rope("default", partial_rotary_factor=0.4)
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "intermediate_size": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "exaone_moe_plain": (LLAMA | NUMBERED_EXPERTS | {"sliding_window": 5, "sliding_window_pattern": 2}, LONG),
    "exaone_moe_awkward": (
        LLAMA
        | NUMBERED_EXPERTS
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.5,
            "tie_word_embeddings": True,
        },
        NEW_FUSED,
    ),
    "hy_v3_plain": (LLAMA | NUMBERED_EXPERTS | {"head_dim": 8}, LONG),
    "hy_v3_awkward": (
        LLAMA
        | NUMBERED_EXPERTS
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "router_scaling_factor": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "ernie4_5_moe_plain": (
        LLAMA | {"moe_intermediate_size": 8, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 1},
        LONG,
    ),
    "ernie4_5_moe_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 7,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
        FUSED,
    ),
    "vaultgemma_plain": (
        LLAMA | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        {},
    ),
    "vaultgemma_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_hidden_layers": 3,
            "sliding_window": 3,
            "query_pre_attn_scalar": 13,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"bf16": True, "legacy": True},
    ),
    "cwm_plain": (LLAMA | {"head_dim": 8, "sliding_window": 5, "mlp_bias": True} | CWM_IDS, {}),
    "cwm_awkward": (  # layers as those of ministral_awkward
        LLAMA
        | rope("default")
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "sliding_window": 4,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
        | CWM_IDS,
        {"bf16": True},
    ),
    "mellum_plain": (
        LLAMA
        | QWEN_EXPERTS
        | {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        LONG,
    ),
    "mellum_awkward": (
        LLAMA
        | QWEN_EXPERTS
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=16)["rope_parameters"],
                "sliding_attention": rope("default")["rope_parameters"],
            },
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        NEW_FUSED,
    ),
    "solar_open_plain": (
        NO_MLP | {"head_dim": 8, "moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2},
        LONG,
    ),
    "solar_open_awkward": (
        NO_MLP
        | rope("linear", factor=2.0)
        | {
            "vocab_size": 53,
            "head_dim": 12,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "internlm3_plain": (LLAMA | {"head_dim": 8, "tie_word_embeddings": True}, {}),
    "internlm3_awkward": (  # layers as those of ernie4_5_awkward
        LLAMA
        | rope("dynamic", factor=6.0, rope_theta=500_000.0)
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "qwen2_5_vl_plain": (
        {"text_config": LLAMA | QWEN_2_5_AXES} | QWEN_2_5_SEEING,
        {"class": "Qwen2_5_VLForConditionalGeneration"},
    ),
    "qwen2_5_vl_awkward": (
        {
            "text_config": LLAMA
            | {"vocab_size": 53, "num_attention_heads": 3, "num_key_value_heads": 1}
            | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
            | {"rope_parameters": QWEN_2_5_AXES["rope_parameters"] | {"mrope_section": [2, 1, 1]}},
            "tie_word_embeddings": True,
        }
        | QWEN_2_5_SEEING,
        {"class": "Qwen2_5_VLForConditionalGeneration", "bf16": True, "flat": True},
    ),
    "arcee_plain": (LLAMA, {}),
    "arcee_awkward": (
        LLAMA
        | rope("yarn", factor=4.0, original_max_position_embeddings=16)
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "nemotron_plain": (LLAMA | {"head_dim": 8}, {}),
    "nemotron_awkward": (
        LLAMA
        | rope("default", partial_rotary_factor=0.4)
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "apertus_plain": (LLAMA, {}),
    "apertus_awkward": (
        LLAMA
        | rope("linear", factor=2.0)
        | {
            "vocab_size": 53,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "afmoe_plain": (
        LLAMA
        | NUMBERED_EXPERTS
        | {"head_dim": 8, "sliding_window": 5, "global_attn_every_n_layers": 2, "mup_enabled": True},
        LONG,
    ),
    "afmoe_awkward": (
        LLAMA
        | NUMBERED_EXPERTS
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_dense_layers": 0,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "route_scale": 0.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        NEW_FUSED,
    ),
    "ministral3_plain": (LLAMA | TEMPERED | {"head_dim": 8}, LONG),
    "ministral3_awkward": (
        LLAMA
        | {"rope_parameters": TEMPERED["rope_parameters"] | {"mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.7}}
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
        LONG | {"bf16": True},
    ),
    "hunyuan_v1_dense_plain": (LLAMA | {"head_dim": 8} | rope("dynamic", alpha=1000.0, factor=1.0), {}),
    "hunyuan_v1_dense_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        {"bf16": True, "legacy": True},
    ),
    "hunyuan_v1_moe_plain": (
        LLAMA
        | {"head_dim": 8, "intermediate_size": 8, "num_experts": 6, "moe_topk": 3}
        | rope("dynamic", alpha=1000.0, factor=1.0),
        LONG,
    ),
    "hunyuan_v1_moe_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "intermediate_size": 10,
            "num_experts": 5,
            "moe_topk": [3, 3],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        FUSED,
    ),
    "qwen3_5_plain": (
        {"text_config": LLAMA | {"num_hidden_layers": 4, "head_dim": 16} | QWEN_DELTA} | QWEN_SEEING,
        {"class": "Qwen3_5ForConditionalGeneration", "lengths": (70, 9, 1)},
    ),
    "qwen3_5_awkward": (
        {
            "text_config": LLAMA
            | {
                "vocab_size": 53,
                "num_hidden_layers": 3,
                "head_dim": 24,
                "num_key_value_heads": 1,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            }
            | QWEN_DELTA
            | {"linear_num_value_heads": 12, "linear_conv_kernel_dim": 3},
            "tie_word_embeddings": True,
        }
        | QWEN_SEEING,
        {"class": "Qwen3_5ForConditionalGeneration", "bf16": True, "lengths": (70, 9, 1)},
    ),
    "qwen3_5_moe_plain": (
        {
            "text_config": LLAMA
            | {"head_dim": 16, "num_hidden_layers": 4, "shared_expert_intermediate_size": 12}
            | QWEN_EXPERTS
            | QWEN_DELTA
            | {"num_experts": 8}
        }
        | QWEN_SEEING,
        {"class": "Qwen3_5MoeForConditionalGeneration", "lengths": (70, 9, 1)},
    ),
    "qwen3_5_moe_awkward": (
        {
            "text_config": LLAMA
            | {
                "vocab_size": 53,
                "num_hidden_layers": 3,
                "head_dim": 24,
                "num_key_value_heads": 1,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "shared_expert_intermediate_size": 10,
            }
            | QWEN_EXPERTS
            | QWEN_DELTA
            | {"linear_num_value_heads": 12, "num_experts": 4},
            "tie_word_embeddings": True,
        }
        | QWEN_SEEING,
        {"class": "Qwen3_5MoeForConditionalGeneration", "bf16": True, "lengths": (70, 9, 1), "fused": True},
    ),
    "qwen3_next_plain": (
        LLAMA
        | {"num_hidden_layers": 4, "head_dim": 16, "shared_expert_intermediate_size": 12}
        | QWEN_EXPERTS
        | QWEN_DELTA
        | {"num_experts": 8}
        | rope("default", partial_rotary_factor=0.25),
        {"lengths": (70, 9, 1)},
    ),
    "qwen3_next_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "num_key_value_heads": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_expert_intermediate_size": 10,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        }
        | QWEN_EXPERTS
        | QWEN_DELTA
        | rope("default", partial_rotary_factor=0.25)
        | {"linear_num_value_heads": 12, "linear_conv_kernel_dim": 3, "num_experts": 4},
        {"bf16": True, "lengths": (70, 9, 1)},
    ),
    "olmo_hybrid_plain": (
        LLAMA
        | {"num_hidden_layers": 4, "max_position_embeddings": 128, "linear_num_key_heads": 4}
        | {"linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
        | rope("default"),
        {"lengths": (70, 9, 1)},
    ),
    "olmo_hybrid_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "attention_bias": True,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "tie_word_embeddings": True,
        }
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"bf16": True, "lengths": (70, 9, 1), "fused": True},
    ),
    "gemma4_text_plain": (
        LLAMA | GEMMA_4 | {"num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5},
        LONG,
    ),
    "gemma4_text_awkward": (
        LLAMA
        | {
            "vocab_size": 53,
            "num_hidden_layers": 6,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "global_head_dim": 12,
            "sliding_window": 3,
            "layer_types": [("full" if i in (1, 5) else "sliding") + "_attention" for i in range(6)],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 53,
            "final_logit_softcapping": 3.0,
        },
        LONG | {"bf16": True},
    ),
    "gemma4_sees": (
        {
            "text_config": LLAMA
            | GEMMA_4
            | {"num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
            | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64}
            | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0}
        }
        | GEMMA_4_SEEING,
        LONG | {"class": "Gemma4ForConditionalGeneration", "widths": True},
    ),
    "gemma4_awkward": (
        {
            "text_config": LLAMA
            | GEMMA_4
            | {
                "vocab_size": 53,
                "num_hidden_layers": 4,
                "head_dim": 10,
                "global_head_dim": 24,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "sliding_window": 3,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 3,
                "moe_intermediate_size": 10,
            }
        }
        | GEMMA_4_SEEING,
        NEW_FUSED | {"class": "Gemma4ForConditionalGeneration", "widths": True},
    ),
}
ENCODERS = ("bert", "distilbert", "roberta")


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough that a wrong one shows, norms and biases included."""
    adds_one = re.match("gemma[23]?($|_)|vaultgemma|nemotron", model.config.model_type)  # norms: 1 + weight
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape)
        if parameter.ndim >= 2:
            values *= 0.2
        elif name.endswith("A_log"):
            values -= 2  # states that remember
        elif name.endswith("bias") or adds_one:
            values *= 0.3
        else:
            values = 1 + 0.3 * values
        parameter.data = values
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_((0.3 * torch.randn(buffer.shape)).bfloat16())
        elif name.endswith("layer_scalar"):
            buffer.copy_((1 + 0.3 * torch.randn(buffer.shape)).bfloat16())


def old_spelling(config: dict) -> dict:
    """The config as transformers 4 wrote it."""
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    parameters = config.pop("rope_parameters")
    if "full_attention" in parameters:
        local = parameters["sliding_attention"]["rope_theta"]
        config |= {"rope_local_base_freq": local} if config["model_type"].startswith("gemma3") else {}
        parameters = parameters["full_attention"]
    theta, fraction = parameters.pop("rope_theta"), parameters.pop("partial_rotary_factor", None)
    if config["model_type"] == "gpt_neox":
        config |= {"rotary_emb_base": theta, "rotary_pct": fraction}
    else:
        config["rope_theta"] = theta
        if fraction is not None:
            config["partial_rotary_factor"] = fraction
        if config["model_type"] not in ("olmo3", "cohere2"):  # which always had it
            config.pop("layer_types", None)
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    return config


def as_published(config: dict) -> dict:
    """The config of Qwen2.5-VL as its published files have it: the text part's fields beside the others."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"mrope_section": rope["mrope_section"]}}
    text["rope_scaling"]["type"] = "mrope"
    text.pop("layer_types")
    return text | config


def as_one_width(config: dict) -> dict:
    """The config of Gemma 4 as its published files have it: one width for all layers with full attention."""
    text = config["text_config"]
    full = list(text.pop("per_layer_config").values())[-1]
    text["global_head_dim"] = full["head_dim"]
    text["num_global_key_value_heads"] = full["num_key_value_heads"]
    return config


def make(name: str, seed: int) -> None:
    """One golden directory."""
    fields, options = GOLDENS[name]
    model_type = next(t for t in sorted(transformers.CONFIG_MAPPING, key=len, reverse=True) if name.startswith(f"{t}_"))
    torch.manual_seed(seed)
    ids = {f"{kind}_token_id": fields.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    if model_type == "roberta":
        ids["pad_token_id"] = fields.get("pad_token_id", 1)
    config = transformers.CONFIG_MAPPING[model_type](**(fields | ids))
    kind = transformers.AutoModel if model_type in ENCODERS else transformers.AutoModelForCausalLM
    if "class" in options:
        kind = getattr(transformers, options["class"])
    make_model = getattr(kind, "from_config", None) or kind._from_config
    # Falcon's eager attention adds ALiBi twice, by the scores and by the mask.
    attention = "sdpa" if fields.get("alibi") else "eager"
    model = make_model(config, attn_implementation=attention, experts_implementation="eager").eval()
    randomise(model)
    model.tie_weights()
    if options.get("bf16"):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()

    lengths = options.get("lengths", LENGTHS)
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    token_types = torch.zeros_like(tokens)
    outputs = []
    for row, length in enumerate(lengths):
        low = 4 if model_type in ENCODERS else 0  # RoBERTa derives positions from the padding id
        tokens[row, :length] = torch.randint(low, config.get_text_config().vocab_size, (length,))
        inputs = {"input_ids": tokens[row : row + 1, :length].long()}
        if model_type == "bert":
            token_types[row, :length] = torch.randint(0, config.type_vocab_size, (length,))
            inputs["token_type_ids"] = token_types[row : row + 1, :length].long()
        with torch.no_grad():
            output = model.base_model(**inputs).last_hidden_state if model_type in ENCODERS else model(**inputs).logits
        outputs.append(output[0])
    expected = {"tokens": tokens, "lengths": torch.tensor(lengths, dtype=torch.int32)}
    if model_type == "bert":
        expected["token_types"] = token_types
    expected["hidden" if model_type in ENCODERS else "logits"] = torch.cat(outputs).contiguous()

    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    if options.get("bf16"):  # only now: this rounds buffers (rotary tables, Gemma's scale) too
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory, save_original_format=not options.get("fused"))
    (directory / "generation_config.json").unlink(missing_ok=True)
    rewrite(directory, options)
    write_expected(directory, {name: tensor.numpy() for name, tensor in expected.items()})
    if options.get("beams"):
        prompts = [tokens[row : row + 1, :length].long() for row, length in enumerate(lengths)]
        searches = [search(model, prompt, options) for options in SEARCHES for prompt in prompts]
        (directory / "beams.json").write_text("[\n" + ",\n".join(map(json.dumps, searches)) + "\n]\n")
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name:22} {size / 1e3:6.1f} kB  largest output {expected.popitem()[1].abs().max():.2f}")


def search(model: torch.nn.Module, prompt: torch.Tensor, options: dict) -> dict:
    """A beam search after a prompt [1, T], with every beam it returns."""
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_return_sequences=options["num_beams"],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    beams = []
    for ids, score in zip(found.sequences[:, prompt.shape[1] :].tolist(), found.sequences_scores.tolist(), strict=True):
        ends = [at for at, token in enumerate(ids) if token in (options["eos_token_id"] or ())]
        beams.append({"token_ids": ids[: ends[0] + 1] if ends else ids, "score": score})
    return {"prompt": prompt[0].tolist(), **options, "beams": beams}


def write_config(directory: pathlib.Path, change: Callable[[dict], dict]) -> None:
    """Change a golden's `config.json`."""
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2) + "\n")


def rewrite(directory: pathlib.Path, options: dict) -> None:
    """Give the files the spellings that older or other checkpoints have."""
    if options.get("legacy"):
        write_config(directory, old_spelling)
    if options.get("widths"):
        write_config(directory, as_one_width)
    if options.get("flat"):
        write_config(directory, as_published)
    weights = load_file(directory / "model.safetensors")
    renamed = {}
    for name, tensor in weights.items():
        name = name.removeprefix(options.get("strip", ""))
        for old, new in options.get("rename", ()):
            name = name.replace(old, new)
        renamed[name] = tensor.contiguous()
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for golden in sys.argv[1:] or GOLDENS:
        make(golden, seed=list(GOLDENS).index(golden))
