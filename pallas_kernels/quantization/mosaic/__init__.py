"""W8A8 of many rows as two kernels (DeepSpeed Inference, arXiv:2207.00032, section III-C).

Rows of x are quantised dynamically, fused with the norm before (`rows.py`), so that x is written and read as int8.
Tiles of int8 are multiplied into int32; the scales and the bias are applied at the end, in registers (`matmul.py`). For
up to 16 rows `small_batch_linear` reads the weights faster.
"""

from jaxinfer.pallas_kernels.quantization.mosaic.matmul import matmul
from jaxinfer.pallas_kernels.quantization.mosaic.rows import quantize

__all__ = ["matmul", "quantize"]
