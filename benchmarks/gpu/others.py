"""Other libraries' implementations that JAX can call, with our operations' arguments.

Each imports its library when called; a library that is not installed is reported as absent.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import KVPages, Weights


def cudnn_prefill(q: jax.Array, pages: KVPages, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Run cuDNN's attention over whole prompts, whose pages are contiguous, so that it needs no page table."""
    k, v = _contiguous(q, pages)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def tokamax_prefill(q: jax.Array, pages: KVPages, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Run tokamax's default attention over whole prompts."""
    import tokamax  # pyright: ignore[reportMissingImports]

    k, v = _contiguous(q, pages)
    return tokamax.dot_product_attention(q, k, v, is_causal=True)


def _contiguous(q: jax.Array, pages: KVPages) -> tuple[jax.Array, jax.Array]:
    if pages.k_scale is not None:
        raise NotImplementedError("int8 caches are not supported")
    shape = len(q), -1, *pages.k.shape[2:]
    return pages.k.reshape(shape), pages.v.reshape(shape)


def jax_ragged_dot(x: jax.Array, weights: Weights, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """Run `jax.lax.ragged_dot`."""
    return jax.lax.ragged_dot(x, jnp.swapaxes(weights.weight, 1, 2), sizes)


def tokamax_ragged_dot(x: jax.Array, weights: Weights, offsets: jax.Array, sizes: jax.Array) -> Any:
    """Run tokamax's default ragged dot."""
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.ragged_dot(x, jnp.swapaxes(weights.weight, 1, 2), sizes)


OTHERS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "paged_attention": {"cuDNN": cudnn_prefill, "tokamax": tokamax_prefill},
    "grouped_matmul": {"ragged_dot": jax_ragged_dot, "tokamax": tokamax_ragged_dot},
}
"""The implementations of other libraries, by operation and library."""
