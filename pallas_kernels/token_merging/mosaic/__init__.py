"""Token merging as two kernels.

The first selects the pairs (`select.py`), with one thread block per batch row, since the choice needs all tokens of a
row. The second multiplies the tokens by the merge matrix (`merge.py`), with one thread block per batch row and 64
features. A matmul is deterministic where a scatter's order could change the sums, and the matrix is built in registers.
"""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.target import UnsupportedError
from jaxinfer.pallas_kernels.token_merging.mosaic.merge import merge, plan_merge
from jaxinfer.pallas_kernels.token_merging.mosaic.select import select

MAX_TOKENS = 1024


def merge_tokens(
    x: jax.Array, size: jax.Array, metric: jax.Array, *, r: int, protected: int, protect_isolated: float | None
) -> tuple[jax.Array, jax.Array]:
    """Merge as the reference, except that weights (sizes) above 256 (float16: 2048) are rounded to x's dtype.

    Raises UnsupportedError.
    """
    if protect_isolated is not None:
        raise UnsupportedError("the kernels choose pairs as ToMe does, without protect_isolated")
    dtypes = (jnp.bfloat16, jnp.float16)
    if x.dtype not in dtypes or metric.dtype not in dtypes:
        raise UnsupportedError(
            f"the kernels take bfloat16 or float16, got x in {x.dtype} and the metric in {metric.dtype}"
        )
    if x.shape[1] > MAX_TOKENS:
        raise UnsupportedError(f"the kernels take at most {MAX_TOKENS} tokens, got {x.shape[1]}")
    for name, features in (("x", x.shape[2]), ("the metric", metric.shape[2])):
        if features % 8:
            raise UnsupportedError(f"TMA needs rows of a multiple of 16 bytes, got {features} features of {name}")
    plan = plan_merge(x, r)  # first, since it may refuse
    return merge(plan, x, size, select(metric, size, r, protected))
