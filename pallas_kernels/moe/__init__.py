"""Mixture of experts by index tables and row copies instead of one-hot matmuls.

`top_k_gating` builds the tables, `permute` groups the tokens by expert, `grouped_matmul` multiplies every row by its
expert's matrix, `unpermute` combines each token's experts (DeepSpeed Inference, section V-C). An MoE layer is

    routing = top_k_gating(logits, k)
    hidden = activation(grouped_matmul(permute(x, routing), w_in, routing.offsets, routing.sizes))
    y = unpermute(grouped_matmul(hidden, w_out, routing.offsets, routing.sizes), routing)

Letters: N tokens of D features, E experts, k experts chosen per token, R rows sorted by expert.
"""

from jaxinfer.pallas_kernels.moe.api import Routing, grouped_matmul, permute, top_k_gating, unpermute

__all__ = ["Routing", "grouped_matmul", "permute", "top_k_gating", "unpermute"]
