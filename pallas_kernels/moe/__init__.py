"""Mixture of experts by index tables and row copies instead of one-hot matmuls.

`top_k_gating` builds the tables, `permute` groups the tokens by expert, `grouped_matmul` multiplies every row by its
expert's matrix, `unpermute` combines each token's experts (DeepSpeed Inference, section V-C); `expert_mlp` is these
three and the activation. An MoE layer is

    routing = top_k_gating(logits, k)
    y = expert_mlp(x, routing, gate_up, down, activation="silu", gated=True)

Letters: N tokens of D features, E experts, k experts chosen per token, R rows sorted by expert.
"""

from jaxinfer.pallas_kernels.moe.api import expert_mlp, grouped_matmul, permute, top_k_gating, unpermute
from jaxinfer.pallas_kernels.moe.routing import Routing, limit_capacity, sort_choices

__all__ = [
    "Routing",
    "expert_mlp",
    "grouped_matmul",
    "limit_capacity",
    "permute",
    "sort_choices",
    "top_k_gating",
    "unpermute",
]
