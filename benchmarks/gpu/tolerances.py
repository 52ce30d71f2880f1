"""The largest errors of correct kernels relative to the exact result."""

import math

import jax.numpy as jnp

_PRODUCTS_OF_A_STEP = 16
"""Products that a tensor core adds to an accumulator at once, for operands of 16 bits."""
_ULP = 2.0**-23
"""The unit in the last place of a float32 accumulator."""


def tolerance(dtype: str, *, roundings: int = 1, products: int = 0, passes: int = 1) -> float:
    """Bound the relative error, in the Frobenius norm, of a correct result of sums of random products.

    Rounding. To round values to `dtype` changes each by at most half a unit in its last place, `eps` / 2, and so their
    norm. Errors of independent roundings add in squares.

    Accumulation. Tensor cores multiply exactly, 16 products at a time, and cut off what is below the last of a
    float32's bits, instead of rounding: of the products and the accumulator as they are aligned to the largest of them,
    and of their sum (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores", section 4). Each cut is at most one
    unit of 2^-23. After j of n such steps the norm of a sum of random terms is sqrt(j / n) of the last one's.
      - A sum is always cut towards zero, so its errors add: to sum_j sqrt(j / n) units, below 2 n / 3 + 1.
      - Products have random signs, so theirs add in squares: to sqrt(16 sum_j j / n) units, below sqrt(8 (n + 1)).
    Sums in float32 arithmetic, which rounds to nearest, err by less: sqrt(sum_j j / n) half units in `products` steps.

    Args:
      dtype: the dtype that results and intermediate values are rounded to.
      roundings: number of roundings to it from the operands to the result. A function that magnifies relative errors m
        times counts m^2.
      products: maximum number of products added up for one element; 0 if sums are exact, as in int32.
      passes: products of tensor core operands for each product: 6 in float32, split into three bfloat16.
    """
    rounding = float(jnp.finfo(dtype).eps) / 2 * math.sqrt(roundings)
    if not products:
        return rounding
    steps = -(-products // _PRODUCTS_OF_A_STEP) * passes
    return rounding + _ULP * (2 * steps / 3 + 1 + math.sqrt(8 * (steps + 1)))
