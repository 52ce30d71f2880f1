"""The performance-critical operations, in rooms: each has an api, a reference in plain JAX, and its implementations.

Imports only JAX. Model code calls these functions and never asks which platform it runs on: `dispatch.py` chooses the
implementation. `docs/kernels.md` describes each operation. A transformer layer is `norm_linear` (QKV),
`cached_attention`, `linear_residual`, `norm_linear` (MLP), `linear_residual`; mixture of experts is in `moe`.
"""

from jaxinfer.pallas_kernels.activations import activate, activate_outputs
from jaxinfer.pallas_kernels.attention.api import attention, cached_attention, paged_attention, split_heads
from jaxinfer.pallas_kernels.delta_rule.api import RecurrentState, Window, gated_delta_rule
from jaxinfer.pallas_kernels.kv_pages import KVPages, write_pages
from jaxinfer.pallas_kernels.linear.api import linear_residual, norm_linear, small_batch_linear
from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.quantization.api import norm_quantize, quantize_rows, quantized_matmul
from jaxinfer.pallas_kernels.token_merging.api import merge_tokens
from jaxinfer.pallas_kernels.weights import Weights

__all__ = [
    "KVPages",
    "RecurrentState",
    "Weights",
    "Window",
    "activate",
    "activate_outputs",
    "attention",
    "cached_attention",
    "gated_delta_rule",
    "linear_residual",
    "merge_tokens",
    "norm_linear",
    "norm_quantize",
    "normalize",
    "paged_attention",
    "quantize_rows",
    "quantized_matmul",
    "small_batch_linear",
    "split_heads",
    "write_pages",
]
