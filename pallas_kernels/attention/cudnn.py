"""Attention by cuDNN, where every query sees every key of its row."""

import jax
import jax.numpy as jnp
from jax._src.lib import cuda_versions  # None without JAX's CUDA plugin; there is no public way to ask for cuDNN

from jaxinfer.pallas_kernels.target import UnsupportedError


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    lengths: jax.Array | None,
    alibi: jax.Array | None,
    key_sizes: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """softmax(scale * q k^T + log(size)) v. Positions do not matter; an empty row sees one key, to stay finite."""
    del q_positions
    if causal or window is not None or softcap is not None or alibi is not None:
        raise UnsupportedError("cuDNN is for attention without causal, window, softcap and ALiBi")
    _check(q, k)
    if key_sizes is not None:
        bias, mask = _size_bias(q, key_sizes), (key_sizes > 0)[:, None, None]
        return jax.nn.dot_product_attention(q, k, v, bias, mask, scale=scale, implementation="cudnn")
    lengths = None if lengths is None else jnp.maximum(lengths, 1)
    return jax.nn.dot_product_attention(q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation="cudnn")


def _check(q: jax.Array, k: jax.Array) -> None:
    """Raise UnsupportedError if cuDNN is not installed, or has no attention for this dtype and head_dim."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        raise UnsupportedError(f"cuDNN takes bfloat16 or float16, got queries in {q.dtype} and keys in {k.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise UnsupportedError(f"cuDNN takes a head_dim of up to 256, a multiple of 8, got {q.shape[-1]}")
    if not _is_installed():
        raise UnsupportedError("cuDNN is not installed")


def _is_installed() -> bool:
    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # the plugin is installed without the library
        return False


def _size_bias(q: jax.Array, key_sizes: jax.Array) -> jax.Array:
    """Return log(size) as cuDNN takes a bias: for every query and in q's dtype, [B, 1, T, S].

    Padding has 0: JAX adds a large negative number where the mask is False, and log(0) is not finite.
    """
    batch, keys = key_sizes.shape
    logs = jnp.log(jnp.where(key_sizes > 0, key_sizes, 1.0)).astype(q.dtype)
    return jnp.broadcast_to(logs[:, None, None], (batch, 1, q.shape[1], keys))
