"""The state that a sequence has in place of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class RecurrentState(NamedTuple):
    """One layer's states, one for each slot.

    Attributes:
      conv: [S, L - 1, Hk, F], the last inputs of the convolution, the oldest first.
      state: float32 [S, Hv, K, V].
    """

    conv: jax.Array
    state: jax.Array

    @classmethod
    def shapes(
        cls, slots: int, *, conv: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: np.dtype
    ) -> "RecurrentState":
        """The shapes and dtypes of the states, which start as zeros. `dtype` is of the convolution's inputs."""
        features = 2 * key_dim + value_heads // key_heads * value_dim
        return cls(
            jax.ShapeDtypeStruct((slots, conv - 1, key_heads, features), dtype),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct((slots, value_heads, key_dim, value_dim), jnp.float32),  # type: ignore[arg-type]
        )
