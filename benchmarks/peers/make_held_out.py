"""Random models of families, and their greedy tokens by transformers: `make_held_out.py OUT FAMILY:SEED...`.

Prints the version, then each model when it is there: a folder FAMILY:SEED, as `save_pretrained` writes it (odd seeds
with a config as transformers 4 wrote it), and in it `greedy.json`: prompts, the tokens after them, and the log
probability of every token. A frequency penalty keeps random models from repeating a token for ever.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import json
import pathlib
import random
import sys

import torch
import transformers

NEW_TOKENS, PENALTY, PROMPTS = 64, 2.0, (1, 13, 30)
SEES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SEES |= {"image_size": 28, "patch_size": 14}
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
SCALED = ("linear", "llama3", "yarn")
QWEN_SEES = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
GEMMA_4_SEES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA_4_SEES |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "position_embedding_size": 4}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}


class Draw(random.Random):
    """What families' configs are made of."""

    def coin(self):
        return self.random() < 0.5

    def flags(self, *names):
        return {name: self.coin() for name in names}

    def act(self):
        return {"hidden_act": self.choice(ACTIVATIONS)}

    def sizes(self, layers=(3, 4)):
        heads, kv_heads = self.choice([(4, 2), (6, 3), (6, 2), (8, 8), (5, 1), (8, 2)])
        return {
            "vocab_size": self.choice([97, 131, 200]),
            "hidden_size": heads * self.choice([8, 10, 12, 16]),
            "intermediate_size": self.choice([56, 72, 100]),
            "num_hidden_layers": self.choice(layers),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 256,
        }

    def rope(self, kinds=("default", *SCALED), **more):
        kind = self.choice(kinds)
        rope = {"rope_type": kind, "rope_theta": self.choice([1e4, 5e5]), **more}
        if kind != "default":
            rope["factor"] = self.choice([2.0, 4.0])
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = 64
        return {"rope_parameters": rope}

    def experts(self, name="num_experts"):
        return {name: 8, "num_experts_per_tok": self.choice([2, 3]), "moe_intermediate_size": self.choice([8, 20])}

    def groups(self):
        factor = self.choice([0.5, 2.5])
        return {"n_group": 4, "topk_group": 2, "routed_scaling_factor": factor} | self.flags("norm_topk_prob")

    def partial(self, head_dim):
        return self.rope(partial_rotary_factor=self.choice([4, 6]) / head_dim + 1e-6)

    def longrope(self, pairs, original):
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
        rope |= {"short_factor": [1 + 0.1 * self.random() for _ in range(pairs)]}
        rope |= {"long_factor": [1 + 3 * self.random() for _ in range(pairs)]}
        return {"rope_parameters": rope | {"original_max_position_embeddings": original}}


def llama(draw):
    return draw.sizes() | draw.rope() | draw.flags("attention_bias", "mlp_bias", "tie_word_embeddings")


def mistral(draw):
    return draw.sizes() | draw.rope() | {"sliding_window": draw.choice([None, 9])}


def mistral3(draw):
    text = mistral(draw) | {"model_type": "mistral", "head_dim": draw.choice([8, 12])}
    return {"text_config": text, "vision_config": SEES | {"model_type": "pixtral", "head_dim": 8}}


def qwen2(draw):
    return draw.sizes() | draw.rope() | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


def qwen3(draw):
    return qwen2(draw) | draw.flags("attention_bias") | {"head_dim": 12}


def gemma2(draw):
    return draw.sizes() | {"head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 20}


def gemma3_text(draw):
    rope = {"sliding_attention": LOCAL, "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}
    fields = draw.sizes(layers=(7,)) | draw.flags("attention_bias") | {"head_dim": draw.choice([8, 16])}
    fields |= {"sliding_window": draw.choice([6, 20]), "query_pre_attn_scalar": draw.choice([8, 24])}
    return fields | {"rope_parameters": rope}


def gemma3(draw):
    text = gemma3_text(draw) | {"model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1}
    return {"text_config": text, "vision_config": SEES, "mm_tokens_per_image": 4}


def olmo2(draw):
    return draw.sizes() | draw.rope() | draw.act() | draw.flags("attention_bias", "tie_word_embeddings")


def olmo3(draw):
    full = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"sliding_attention": LOCAL | {"rope_theta": 5e5}, "full_attention": full}
    return olmo2(draw) | {"sliding_window": draw.choice([6, 20]), "num_hidden_layers": 5, "rope_parameters": rope}


def granite(draw):
    factors = {"embedding_multiplier": draw.choice([1.0, 6.0]), "logits_scaling": draw.choice([1.0, 4.0])}
    return llama(draw) | factors | {"residual_multiplier": 0.4, "attention_multiplier": 0.2}


def smollm3(draw):
    return llama(draw) | {"num_hidden_layers": 5, "no_rope_layer_interval": draw.choice([2, 4])}


def cohere(draw):
    fields = draw.sizes() | draw.rope() | {"logit_scale": draw.choice([0.0625, 0.5])}
    return fields | draw.flags("use_qk_norm", "attention_bias", "tie_word_embeddings")


def cohere2(draw):
    fields = draw.sizes(layers=(5,)) | draw.rope() | {"logit_scale": draw.choice([0.0625, 0.5])}
    return fields | draw.flags("attention_bias", "tie_word_embeddings") | {"sliding_window": draw.choice([6, 20])}


def phi(draw):
    fields = draw.sizes() | draw.act() | draw.flags("qk_layernorm")
    return fields | draw.partial(fields["hidden_size"] // fields["num_attention_heads"])


def phi3(draw):
    fields = draw.sizes() | draw.flags("tie_word_embeddings") | {"sliding_window": draw.choice([None, 9])}
    original = draw.choice([8, 256])  # all prompts are longer, or all texts shorter
    fields |= {"hidden_size": 16 * fields["num_attention_heads"], "original_max_position_embeddings": original}
    return fields | draw.longrope(6, original)


def stablelm(draw):
    fields = draw.sizes() | draw.act()
    fields |= draw.flags("qk_layernorm", "use_parallel_residual", "use_qkv_bias", "tie_word_embeddings")
    return fields | draw.partial(fields["hidden_size"] // fields["num_attention_heads"])


def starcoder2(draw):
    fields = draw.sizes() | draw.rope() | draw.act() | draw.flags("use_bias", "tie_word_embeddings")
    return fields | {"sliding_window": draw.choice([None, 7, 20]), "norm_epsilon": draw.choice([1e-5, 1e-3])}


def glm(draw):
    head_dim = draw.choice([8, 12, 20])
    fields = draw.sizes() | draw.act() | draw.flags("attention_bias", "tie_word_embeddings")
    return fields | draw.partial(head_dim) | {"head_dim": head_dim}


def glm4(draw):
    return glm(draw)


def falcon(draw):
    fields = draw.sizes() | draw.rope() | draw.flags("bias", "tie_word_embeddings") | {"layer_norm_epsilon": 1e-4}
    kv_heads, kind = fields.pop("num_key_value_heads"), draw.choice(["two norms", "one norm", "multi-query", "plain"])
    del fields["intermediate_size"]
    if kind in ("two norms", "one norm"):
        norms = {"num_ln_in_parallel_attn": 1} if kind == "one norm" else {}
        return fields | {"new_decoder_architecture": True, "num_kv_heads": kv_heads} | norms
    return fields | {"multi_query": kind == "multi-query"} | draw.flags("parallel_attn")


def gemma(draw):
    return draw.sizes() | draw.flags("attention_bias", "tie_word_embeddings") | {"head_dim": draw.choice([8, 12])}


def seed_oss(draw):
    biases = draw.flags("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings")
    return draw.sizes() | draw.rope() | biases | {"head_dim": draw.choice([8, 20])}


def ernie4_5(draw):
    fields = draw.sizes() | draw.rope() | draw.act() | draw.flags("use_bias", "tie_word_embeddings")
    return fields | {"head_dim": draw.choice([8, 20])}


def exaone4(draw):
    fields = draw.sizes(layers=(5,)) | draw.rope() | draw.flags("tie_word_embeddings")
    window = draw.choice([None, 9])
    return fields | ({"layer_types": ["full_attention"] * 5} if window is None else {}) | {"sliding_window": window}


def ministral(draw):
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(4)]
    fields = draw.sizes(layers=(4,)) | draw.rope() | draw.flags("tie_word_embeddings")
    return fields | {"head_dim": draw.choice([8, 20]), "sliding_window": 9, "layer_types": kinds}


def vaultgemma(draw):
    return gemma2(draw) | draw.flags("attention_bias", "tie_word_embeddings")


def cwm(draw):
    fields = draw.sizes(layers=(5,)) | draw.rope(kinds=SCALED) | draw.flags("mlp_bias", "tie_word_embeddings")
    return fields | {"head_dim": draw.choice([8, 20]), "sliding_window": draw.choice([6, 20])}


def internlm3(draw):
    fields, bias = draw.sizes() | draw.rope() | draw.flags("tie_word_embeddings"), draw.coin()
    return fields | {"attention_bias": bias, "mlp_bias": bias, "head_dim": draw.choice([8, 20])}


def qwen3_vl(draw):
    text = draw.sizes() | draw.rope(mrope_section=[2, 1, 1], mrope_interleaved=True) | draw.flags("attention_bias")
    return {"text_config": text | {"head_dim": 8}, "vision_config": QWEN_SEES} | draw.flags("tie_word_embeddings")


def qwen2_5_vl(draw):
    fields = draw.sizes() | {"use_sliding_window": draw.coin(), "sliding_window": 9, "max_window_layers": 1}
    fields |= {"hidden_size": 12 * fields["num_attention_heads"]} | draw.rope(mrope_section=[2, 2, 2])
    return {"text_config": fields, "vision_config": QWEN_SEES} | draw.flags("tie_word_embeddings")


def minimax_m2(draw):
    fields = draw.sizes() | {"head_dim": 12, "intermediate_size": draw.choice([8, 20])} | draw.partial(12)
    return fields | draw.experts("num_local_experts") | draw.flags("tie_word_embeddings")


def exaone_moe(draw):
    fields = draw.sizes(layers=(5,)) | draw.rope() | draw.experts() | draw.flags("tie_word_embeddings")
    fields |= {"first_k_dense_replace": draw.choice([0, 2]), "num_shared_experts": draw.choice([1, 2])}
    return fields | draw.groups() | {"sliding_window": draw.choice([6, 20])}


def hy_v3(draw):
    kinds = [draw.choice(["dense", "sparse"]) for _ in range(4)]
    fields = draw.sizes(layers=(4,)) | draw.rope() | draw.experts() | {"head_dim": draw.choice([8, 20])}
    fields |= draw.flags("attention_bias", "mlp_bias", "tie_word_embeddings") | {"mlp_layer_types": kinds}
    return fields | {"num_shared_experts": draw.choice([1, 2]), "router_scaling_factor": draw.choice([0.5, 2.8])}


def ernie4_5_moe(draw):
    fields, bias = draw.sizes(layers=(5,)) | draw.rope(), draw.coin()
    fields |= {"moe_layer_interval": draw.choice([1, 2]), "moe_layer_end_index": draw.choice([-1, 3])}
    fields |= {"moe_num_shared_experts": draw.choice([0, 2]), "use_bias": bias, "tie_word_embeddings": not bias}
    return fields | {"moe_num_experts": 8, "moe_k": draw.choice([2, 3]), "moe_intermediate_size": 20}


def mellum(draw):
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(4)]
    rope = {"sliding_attention": LOCAL, "full_attention": draw.rope()["rope_parameters"]}
    fields = draw.sizes(layers=(4,)) | draw.experts() | {"head_dim": draw.choice([8, 20]), "sliding_window": 9}
    fields |= draw.flags("attention_bias", "norm_topk_prob", "tie_word_embeddings") | {"layer_types": kinds}
    return fields | {"rope_parameters": rope, "mlp_layer_types": ["sparse", draw.choice(["dense", "sparse"])] * 2}


def solar_open(draw):
    fields = draw.sizes() | draw.rope() | draw.experts("n_routed_experts") | {"head_dim": draw.choice([8, 20])}
    del fields["intermediate_size"]
    return fields | draw.groups() | draw.flags("attention_bias", "tie_word_embeddings")


def arcee(draw):
    return llama(draw)


def apertus(draw):
    return draw.sizes() | draw.rope(kinds=SCALED) | draw.flags("attention_bias", "tie_word_embeddings")


def afmoe(draw):
    fields = draw.sizes(layers=(5,)) | draw.rope() | draw.experts() | {"head_dim": draw.choice([8, 20])}
    fields |= draw.flags("attention_bias", "mup_enabled", "tie_word_embeddings") | {"sliding_window": 9}
    return fields | {"num_dense_layers": draw.choice([0, 2]), "route_scale": draw.choice([0.5, 2.5])}


def nemotron(draw):
    fields = draw.sizes() | draw.flags("attention_bias", "mlp_bias", "tie_word_embeddings") | draw.partial(12)
    return fields | {"head_dim": 12, "norm_eps": draw.choice([1e-5, 1e-3])}


def ministral3(draw):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"llama_4_scaling_beta": draw.choice([0.1, 0.5]), "mscale": 1.0, "mscale_all_dim": draw.choice([0.5, 1.0])}
    fields = draw.sizes() | {"head_dim": draw.choice([8, 20]), "sliding_window": draw.choice([None, 9])}
    return fields | {"rope_parameters": rope} | draw.flags("tie_word_embeddings")


def hunyuan_v1_dense(draw):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    fields = draw.sizes() | draw.rope(kinds=("default", "linear")) | draw.flags("attention_bias", "tie_word_embeddings")
    return fields | {"head_dim": draw.choice([8, 20])} | ({"rope_parameters": rope} if draw.coin() else {})


def hunyuan_v1_moe(draw):
    experts = {"num_experts": 8, "moe_topk": draw.choice([2, 3]), "intermediate_size": draw.choice([8, 20])}
    return hunyuan_v1_dense(draw) | experts


def delta_rules(draw, layers):
    """The fields of gated delta rules, in some layers of so many but not in all."""
    kinds = [
        "linear_attention",
        "full_attention",
        *(draw.choice(["linear_attention", "full_attention"]) for _ in range(layers - 2)),
    ]
    draw.shuffle(kinds)
    key_heads = draw.choice([1, 2, 4])
    fields = {"linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * draw.choice([1, 2, 3])}
    fields |= {"linear_key_head_dim": draw.choice([6, 8, 16]), "linear_value_head_dim": draw.choice([5, 8, 16])}
    return fields | {"linear_conv_kernel_dim": draw.choice([2, 4]), "layer_types": kinds}


def qwen3_5_text(draw):
    fields, head_dim = draw.sizes(layers=(4, 5)), draw.choice([16, 24])
    rope = {"partial_rotary_factor": draw.choice([0.25, 0.5]), "mrope_section": [1, 1, 1], "mrope_interleaved": True}
    fields |= draw.rope(kinds=("default",), **rope) | {"head_dim": head_dim}
    return fields | delta_rules(draw, fields["num_hidden_layers"])


def qwen3_5(draw):
    return {"text_config": qwen3_5_text(draw), "vision_config": QWEN_SEES} | draw.flags("tie_word_embeddings")


def qwen3_5_moe(draw):
    text = qwen3_5_text(draw) | draw.experts() | {"shared_expert_intermediate_size": draw.choice([10, 24])}
    del text["intermediate_size"]
    return {"text_config": text, "vision_config": QWEN_SEES} | draw.flags("tie_word_embeddings")


def qwen3_next(draw):
    fields = draw.sizes(layers=(4, 5)) | draw.rope(partial_rotary_factor=draw.choice([0.25, 0.5])) | draw.experts()
    fields |= {"head_dim": draw.choice([16, 24]), "shared_expert_intermediate_size": draw.choice([10, 24])}
    fields |= {"decoder_sparse_step": draw.choice([1, 2]), "mlp_only_layers": draw.choice([[], [1]])}
    fields |= draw.flags("norm_topk_prob", "tie_word_embeddings")
    return fields | delta_rules(draw, fields["num_hidden_layers"])


def olmo_hybrid(draw):
    fields = draw.sizes(layers=(4, 5)) | draw.flags("attention_bias", "linear_allow_neg_eigval", "tie_word_embeddings")
    fields |= delta_rules(draw, fields["num_hidden_layers"])
    if draw.coin():  # widths of heads by the model's
        del fields["linear_key_head_dim"], fields["linear_value_head_dim"]
    return fields | (draw.rope() if draw.coin() else {"rope_parameters": {"rope_type": "default", "rope_theta": None}})


def gemma4_text(draw, **more):
    fields = draw.sizes(layers=(4, 6)) | {"head_dim": draw.choice([8, 20]), "global_head_dim": draw.choice([12, 32])}
    layers = fields["num_hidden_layers"]
    both = ["sliding_attention", "full_attention"]
    kinds = [*both, *draw.choices(both, k=layers - 3), "full_attention"]
    fields |= {"layer_types": kinds, "sliding_window": draw.choice([5, 9])}
    # transformers cannot run shared keys without layer inputs.
    shared, inputs = draw.choice([(0, 0), (0, 6), (layers - 2, 6)])
    fields |= {"num_kv_shared_layers": shared, "hidden_size_per_layer_input": inputs}
    fields |= {"vocab_size_per_layer_input": fields["vocab_size"], "final_logit_softcapping": draw.choice([None, 5.0])}
    return fields | draw.flags("use_double_wide_mlp", "attention_bias", "tie_word_embeddings") | more


def gemma4(draw):
    fields = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": draw.choice([2, 3])}
    fields |= {"moe_intermediate_size": draw.choice([8, 20]), "num_global_key_value_heads": 1}
    fields |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
    text = gemma4_text(draw, **fields)
    return {"text_config": text, "vision_config": GEMMA_4_SEES} | draw.flags("tie_word_embeddings")


def as_transformers_4(config):
    """Rope parameters in the fields that they were in; those by kind of layer are left as they are."""
    for fields in (config, config.get("text_config") or {}):
        rope = fields.get("rope_parameters")
        if rope and "rope_type" in rope:
            del fields["rope_parameters"]
            fields["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
            if "partial_rotary_factor" in rope:
                fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
            fields["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return config


def randomise(model):
    """Weights large enough that a wrong one shows."""
    kind = model.config.model_type
    adds_one = "nemotron" in kind or ("gemma" in kind and "gemma4" not in kind)  # norms multiply by 1 + weight
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape)
        if parameter.ndim >= 2:
            values *= 1.5 / parameter.shape[-1] ** 0.5
        elif name.endswith("A_log"):
            values -= 2  # states that remember
        elif name.endswith("bias") or adds_one:
            values *= 0.3
        else:
            values = 1 + 0.3 * values
        parameter.data = values
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape))
        elif name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape))
    model.tie_weights()


@torch.no_grad()
def continued(model, prompt, vocab):
    """A prompt [1, T] with its greedy tokens, and the log probability of each token but the first."""
    ids, step, cache, counts = prompt, prompt, None, torch.zeros(vocab)
    for _ in range(NEW_TOKENS):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        token = (out.logits[0, -1] - PENALTY * counts).argmax()
        counts[token] += 1
        step = token[None, None]
        ids = torch.cat((ids, step), 1)
    logprobs = model(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    told = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return {"prompt": prompt[0].tolist(), "tokens": ids[0, prompt.shape[1] :].tolist(), "logprobs": told}


def make(out, family, seed):
    draw = Draw(f"{family}{seed}")
    torch.manual_seed(seed + 1000)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if family == "cwm":  # which needs them
        ids |= {"bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CONFIG_MAPPING[family](**globals()[family](draw), **ids)
    kind = "AutoModelForImageTextToText" if hasattr(config, "text_config") else "AutoModelForCausalLM"
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(transformers, kind).from_config(config, **plain).eval()
    randomise(model)
    vocab = config.get_text_config().vocab_size
    lengths = [n for n in PROMPTS if n > 8] if family == "phi3" else PROMPTS
    rows = [continued(model, torch.randint(0, vocab, (1, n)), vocab) for n in lengths]
    folder = out / f"{family}:{seed}"
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if seed % 2:
        file = folder / "config.json"
        file.write_text(json.dumps(as_transformers_4(json.loads(file.read_text()))))
    (folder / "greedy.json").write_text(json.dumps(rows))
    print(folder.name, flush=True)


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"transformers {transformers.__version__}", flush=True)
    for item in sys.argv[2:]:
        name, number = item.split(":")
        make(pathlib.Path(sys.argv[1]), name, int(number))
