"""The nonlinearities of a transformer's MLP, shared by the plain-JAX implementations and the kernels."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def activate(x: jax.Array, name: str, *, erf: Callable[[jax.Array], jax.Array] = lax.erf) -> jax.Array:
    """Apply the named nonlinearity elementwise, in float32, and round to x's dtype.

    Args:
      name: "gelu" (exact, with erf), "gelu_tanh" (the tanh approximation), "relu", "relu2" (its square) or
        "silu".
      erf: the error function to use; kernels pass an approximation, since Mosaic has none.
    Raises: ValueError for any other name.
    """
    y = x.astype(jnp.float32)
    match name:
        case "gelu":
            y = 0.5 * y * (1.0 + erf(y * math.sqrt(0.5)))
        case "gelu_tanh":
            y = 0.5 * y * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y * y * y)))
        case "relu":
            y = jnp.maximum(y, 0.0)
        case "relu2":
            y = jnp.square(jnp.maximum(y, 0.0))
        case "silu":
            y = y * lax.logistic(y)
        case _:
            raise ValueError(f"activation must be gelu, gelu_tanh, relu, relu2 or silu, got {name!r}.")
    return y.astype(x.dtype)


def approximate_erf(x: jax.Array) -> jax.Array:
    """Approximate the error function to 1.5e-7 (Abramowitz and Stegun, formula 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * jnp.abs(x))
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y = 1.0 - polynomial * jnp.exp(-x * x)
    return jnp.where(x < 0.0, -y, y)


def activate_outputs(y: jax.Array, name: str | None, *, gated: bool) -> jax.Array:
    """act(y) of a product [..., N]; with `gated`, outputs alternate (gate, up) and the result is act(gate) * up,
    [..., N / 2]. Without an activation if `name` is None."""
    up = None
    if gated:
        pairs = y.reshape(*y.shape[:-1], -1, 2)
        y, up = pairs[..., 0], pairs[..., 1]
    y = y if name is None else activate(y, name)
    return y if up is None else y * up
