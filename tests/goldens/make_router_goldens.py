"""Makes `routers.safetensors`: what the routers of `transformers` choose, by rule and kind of logits.

Runs in the environment of `make_goldens.py`. The rows of x are those of the identity, so that a router's matrix is the
transposed logits. Of each rule RULE/KIND/weight and bias (of routers that have one) are what the router was given, and
RULE/KIND/chosen, float32 [N, E], has the weights of the chosen experts and 0 elsewhere. The metadata has the fields of
each rule's `config.json`. NaN is given as the lowest number: `torch.topk` would choose it first.
"""

import importlib
import json
import pathlib

import torch
import transformers
from safetensors.torch import save_file

TOKENS, EXPERTS = 12, 8
SIZES = {
    "vocab_size": 8,
    "hidden_size": TOKENS,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
    "num_experts_per_tok": 3,
}
LOCAL, QWEN = {"num_local_experts": EXPERTS}, {"num_experts": EXPERTS, "moe_intermediate_size": 8}
DEEPSEEK = {"n_routed_experts": EXPERTS, "moe_intermediate_size": 8, "first_k_dense_replace": 0, "n_shared_experts": 1}
GROUPS = {"n_group": 4, "topk_group": 2}
RULES = {
    "mixtral": ("mixtral", "MixtralTopKRouter", LOCAL),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeTopKRouter", QWEN | {"norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeTopKRouter", QWEN | {"norm_topk_prob": True}),
    "olmoe": ("olmoe", "OlmoeTopKRouter", QWEN | {"norm_topk_prob": False}),
    "granitemoe": ("granitemoe", "GraniteMoeTopKRouter", LOCAL),
    "glm4_moe": ("glm4_moe", "Glm4MoeTopkRouter", DEEPSEEK | GROUPS | {"routed_scaling_factor": 2.5}),
    "dots1": ("dots1", "Dots1TopkRouter", DEEPSEEK | {"norm_topk_prob": False, "routed_scaling_factor": 0.5}),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2TopkRouter", DEEPSEEK | {"routed_scaling_factor": 16.0}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        DEEPSEEK | GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3TopkRouter", DEEPSEEK | GROUPS | {"routed_scaling_factor": 2.5}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        "Ernie4_5_MoeTopKRouter",
        {"moe_num_experts": EXPERTS, "moe_k": 3, "moe_intermediate_size": 8, "moe_layer_start_index": 0},
    ),
}


def logits_of(kind: str) -> torch.Tensor:
    """Logits [N, E]."""
    logits = torch.randn(TOKENS, EXPERTS)
    if kind == "negative":
        return logits - 20
    if kind == "ties":
        return logits[:, ::2].repeat_interleave(2, dim=1)  # in pairs, which are groups
    if kind == "one":
        logits[:, 4:6] += 30  # a whole group, or its score would not be the best
    if kind == "nan":
        logits[:, 2] = torch.finfo(torch.float32).min
    return logits


def main() -> None:
    """Write all rules, with each kind of logits, and those with a bias also with large ones."""
    torch.manual_seed(0)
    tensors, fields = {}, {}
    for rule, (model_type, router_class, options) in RULES.items():
        fields[rule] = json.dumps(SIZES | options | {"model_type": model_type})
        config = transformers.CONFIG_MAPPING[model_type](**SIZES, **options)
        modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        router = getattr(modeling, router_class)(config)
        bias = getattr(getattr(router, "moe_statics", router), "e_score_correction_bias", None)
        for kind in ("plain", "negative", "ties", "one", "nan", *(() if bias is None else ("bias 30", "bias -30"))):
            logits = logits_of(kind)
            router.weight.data = logits.T.contiguous()
            if bias is not None:
                bias.data[...] = 0.2 * torch.randn(EXPERTS)
            if bias is not None and kind.startswith("bias"):
                bias.data[..., torch.tensor([1, 6])] += float(kind.split()[1])
            if bias is not None and kind == "ties":
                bias.data.zero_()
            with torch.no_grad():
                _, weights, experts = router(torch.eye(TOKENS))
            name = f"{rule}/{kind}"
            tensors[f"{name}/weight"] = router.weight.data.clone()
            if bias is not None:
                tensors[f"{name}/bias"] = bias.data.flatten().clone()
            tensors[f"{name}/chosen"] = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)
    save_file(tensors, pathlib.Path(__file__).parent / "routers.safetensors", metadata=fields)


if __name__ == "__main__":
    main()
