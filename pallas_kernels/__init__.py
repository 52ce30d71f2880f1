"""The operations that decide speed, each as its plain-JAX definition and, where there is one, a GPU kernel.

Imports jax only. Model code calls these functions and never asks which platform it runs on: the choice between
a kernel and the definition is made here. Start at `linear.py` (matrix products), then `attention.py`.
"""

from pallas_kernels.activations import activate
from pallas_kernels.attention import attention
from pallas_kernels.kv_pages import KVPages, write_pages
from pallas_kernels.linear import linear, quantized_linear
from pallas_kernels.linear_residual import linear_residual
from pallas_kernels.merge_tokens import merge_tokens
from pallas_kernels.norm_linear import norm_linear, normalize
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.small_batch_linear import small_batch_linear
from pallas_kernels.weights import quantize_rows

__all__ = [
    "KVPages",
    "activate",
    "attention",
    "linear",
    "linear_residual",
    "merge_tokens",
    "norm_linear",
    "normalize",
    "paged_attention",
    "quantize_rows",
    "quantized_linear",
    "small_batch_linear",
    "write_pages",
]
