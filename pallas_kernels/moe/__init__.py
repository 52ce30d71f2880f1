"""Mixture of experts without one-hot products: tables say which token goes where, and rows are copied by them.

`top_k_gating` makes the tables, `permute` brings each expert's tokens together, `grouped_matmul` multiplies every row
by its expert's matrix, `unpermute` mixes a token's experts (DeepSpeed Inference, section V-C). One expert layer is

    routing = top_k_gating(logits, k)
    hidden = activation(grouped_matmul(permute(x, routing), w_in, routing.offsets, routing.sizes))
    y = unpermute(grouped_matmul(hidden, w_out, routing.offsets, routing.sizes), routing)

Letters: N tokens of D numbers, E experts, k choices of each token, R rows sorted by expert.
"""

from pallas_kernels.moe.gating import Routing, top_k_gating
from pallas_kernels.moe.grouped_matmul import grouped_matmul
from pallas_kernels.moe.layout import permute, unpermute

__all__ = ["Routing", "grouped_matmul", "permute", "top_k_gating", "unpermute"]
