"""The operations of a mixture of experts as Mosaic GPU kernels."""

from jaxinfer.pallas_kernels.moe.mosaic.gating import top_k_gating
from jaxinfer.pallas_kernels.moe.mosaic.grouped_matmul import grouped_matmul
from jaxinfer.pallas_kernels.moe.mosaic.rows import permute, unpermute

__all__ = ["grouped_matmul", "permute", "top_k_gating", "unpermute"]
