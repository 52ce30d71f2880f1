"""The performance-critical operations, each with a plain-JAX implementation and a GPU kernel.

Imports only JAX. Model code calls these functions and never asks which platform it runs on: `dispatch.py` chooses
between the kernel and plain JAX. `docs/kernels.md` describes each operation. A transformer layer is `norm_linear`
(QKV), `cached_attention`, `linear_residual`, `norm_linear` (MLP), `linear_residual`; mixture of experts is in `moe`.
"""

from jaxinfer.pallas_kernels.activations import activate, activate_outputs
from jaxinfer.pallas_kernels.attention import attention
from jaxinfer.pallas_kernels.cached_attention import cached_attention, split_heads
from jaxinfer.pallas_kernels.kv_pages import KVPages, write_pages
from jaxinfer.pallas_kernels.linear_residual import linear_residual
from jaxinfer.pallas_kernels.merge_tokens import merge_tokens
from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.norm_linear import norm_linear
from jaxinfer.pallas_kernels.paged_attention import paged_attention
from jaxinfer.pallas_kernels.quantized_matmul import norm_quantize, quantize_rows, quantized_matmul
from jaxinfer.pallas_kernels.small_batch_linear import small_batch_linear
from jaxinfer.pallas_kernels.weights import Weights

__all__ = [
    "KVPages",
    "Weights",
    "activate",
    "activate_outputs",
    "attention",
    "cached_attention",
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
