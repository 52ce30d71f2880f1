"""The state that a sequence has in place of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Window(NamedTuple):
    """The tokens after the state of each slot that may turn out wrong: what the rule takes of them.

    Their states are not kept but computed again from the slot's state, for those that turned out right (`window.py`):
    they are W times as large, and reading and writing them would take most of a pass.

    Attributes:
      start: int32 [S], the position of the first; 0: there is none.
      qkv: [S, W, Hk, F], the inputs of the convolution.
      decay, beta: float32 [S, W, Hv].
    """

    start: jax.Array
    qkv: jax.Array
    decay: jax.Array
    beta: jax.Array


class RecurrentState(NamedTuple):
    """One layer's states, one for each slot.

    Attributes:
      conv: [S, L - 1, Hk, F], the last inputs of the convolution, the oldest first.
      state: float32 [S, Hv, K, V].
      window: of tokens that may turn out wrong; None: there are none, and the states are of all tokens.
    """

    conv: jax.Array
    state: jax.Array
    window: Window | None = None

    @classmethod
    def shapes(
        cls,
        slots: int,
        *,
        conv: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: np.dtype,
        window: int = 0,
    ) -> "RecurrentState":
        """The shapes and dtypes of the states, which start as zeros.

        Args:
          dtype: of the convolution's inputs.
          window: W, the most tokens of a pass that may turn out wrong.
        """
        features, float32 = 2 * key_dim + value_heads // key_heads * value_dim, np.dtype(jnp.float32)

        def shape(dtype: np.dtype, *sizes: int) -> jax.Array:
            return jax.ShapeDtypeStruct((slots, *sizes), dtype)  # type: ignore[return-value]

        steps = shape(float32, window, value_heads)
        of_window = Window(shape(np.dtype(jnp.int32)), shape(dtype, window, key_heads, features), steps, steps)
        return cls(
            shape(dtype, conv - 1, key_heads, features),
            shape(float32, value_heads, key_dim, value_dim),
            of_window if window else None,
        )
