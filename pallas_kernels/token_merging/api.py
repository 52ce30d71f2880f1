"""Token merging for encoders: bipartite soft matching (ToMe, arXiv:2210.09461, section 3).

Tokens at even positions (A) may be merged into tokens at odd positions (B). Each token of A finds its most similar
token of B, and the `r` most similar of these pairs become size-weighted means. The result is [the rest of A in order, B
in order], so that the next layer chooses among other pairs. Tokens of size 0 are padding: those of A are removed before
any other, and those of B receive no token as long as there is another place for it.

With `protect_isolated`, pairs are chosen by energy instead (PiToMe, arXiv:2405.16148).
"""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import mosaic, reference
from jaxinfer.pallas_kernels.token_merging import mosaic as kernels
from jaxinfer.pallas_kernels.token_merging import reference as plain

_merge_tokens = Operation("merge_tokens", mosaic(kernels.merge_tokens), reference(plain.merge_tokens))


def merge_tokens(
    x: jax.Array,
    size: jax.Array | None,
    metric: jax.Array,
    r: int,
    *,
    protected: int = 1,
    protect_isolated: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Remove `r` tokens from every batch row, by merging them with similar ones.

    Args:
      x: [B, n, d], the tokens.
      size: float32 [B, n], how many original tokens each of them is the mean of; None: one. Tokens of size 0 are
        padding, at any place: finite, but no result depends on them.
      metric: [B, n, m], compared by cosine similarity; in ToMe the keys, averaged over heads.
      r: how many tokens to remove; limited to half of the tokens that are not protected.
      protected: the first `protected` tokens (class token, prompts) are neither merged nor merged into.
      protect_isolated: None: ToMe, which merges the `r` tokens of A that are most similar to one of B. A margin m:
        PiToMe, which spares isolated tokens. The energy of a token is the mean, over the other tokens that are neither
        protected nor padding, of f(cosine), with f(c) = c if c >= m, else exp(c - m) - 1. Of the 2 r tokens of highest
        energy in descending order, those at even places are merged into those at odd places. Runs as plain XLA.
    Returns [B, n - r, d] in x's dtype and its sizes, float32 [B, n - r]; zeros where the size is 0. Order: the other
    tokens in theirs, then those that may have received tokens: B, or by descending energy. Padding is removed first:
    of ToMe's A, or (PiToMe) in place of a pair each. Among equally similar pairs, earlier ones are merged first.
    """
    batch, count, _ = x.shape
    size = jnp.ones((batch, count), jnp.float32) if size is None else size.astype(jnp.float32)
    # Of the tokens from `protected` on, at least half, rounded down, are in A, and at least one is in B. So there are
    # always r tokens to remove that rank before the protected ones, and each has a place to go to.
    r = min(r, (count - protected) // 2)
    if r <= 0:
        return x, size
    options = {"r": r, "protected": protected, "protect_isolated": protect_isolated}
    return _merge_tokens(x, size, metric, **options)
