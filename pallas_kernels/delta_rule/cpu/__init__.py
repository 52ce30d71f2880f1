"""The gated delta rule in C++, for CPUs: states are read and written where they are, once for all tokens of a row.

`delta_rule.h` is the kernel, `delta_rule.cc` what XLA calls. Prompts run token by token, too: while a block of a state
is in the first-level cache, that takes fewer operations than products of chunks.
"""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.cpu.arguments import or_empty
from jaxinfer.pallas_kernels.cpu.library import ffi_call
from jaxinfer.pallas_kernels.delta_rule.recurrent_state import RecurrentState
from jaxinfer.pallas_kernels.target import UnsupportedError

MAX_GUESSED_TOKENS = 64
"""Tokens of a row, of which not all move its state, at most: `kPieceTokens` in delta_rule.h."""


def gated_delta_rule(
    qkv: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    conv_weight: jax.Array,
    cache: RecurrentState,
    slot: jax.Array,
    positions: jax.Array,
    kept: jax.Array | None = None,
    *,
    key_dim: int,
) -> tuple[jax.Array, RecurrentState]:
    """Convolve, and move the states on, in one call. Arguments as of `api`. Raises UnsupportedError.

    kept: int32 [B], how many of a row's tokens move its state; the others only read what it would be. None: all.
    """
    _check_dtypes(qkv, cache, (decay, beta, conv_weight), (slot, positions, *([] if kept is None else [kept])))
    if kept is not None and qkv.shape[1] > MAX_GUESSED_TOKENS:
        raise UnsupportedError(f"a row with guesses has at most {MAX_GUESSED_TOKENS} tokens, got {qkv.shape[1]}")
    assert key_dim == cache.state.shape[2]
    result = jax.ShapeDtypeStruct((*decay.shape, cache.state.shape[3]), jnp.float32)
    output, conv, state = ffi_call(
        "jaxinfer_gated_delta_rule",
        (result, jax.typeof(cache.conv), jax.typeof(cache.state)),
        qkv,
        decay,
        beta,
        conv_weight,
        cache.conv,
        cache.state,
        slot,
        positions,
        or_empty(kept),
        aliases={4: 1, 5: 2},
    )
    return output, cache._replace(conv=conv, state=state)


def _check_dtypes(
    qkv: jax.Array, cache: RecurrentState, vectors: tuple[jax.Array, ...], indices: tuple[jax.Array, ...]
) -> None:
    """Raise UnsupportedError for dtypes that the kernel does not take."""
    if qkv.dtype not in (jnp.float32, jnp.bfloat16) or cache.conv.dtype != qkv.dtype:
        raise UnsupportedError(
            "the convolution's inputs must be float32 or bfloat16, new ones as those in the cache; got "
            f"{qkv.dtype} and {cache.conv.dtype}"
        )
    for vector in vectors:
        if vector.dtype != jnp.float32:
            raise UnsupportedError(f"decays, betas and the convolution's weights must be float32, got {vector.dtype}")
    for index in indices:
        if index.dtype != jnp.int32:
            raise UnsupportedError(f"slots and positions must be int32, got {index.dtype}")
