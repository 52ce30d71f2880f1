"""Normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import NormConfig, NormKind
from jaxinfer.pallas_kernels import normalize


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dimension, computed in float32."""

    def __init__(self, size: int, cfg: NormConfig):
        self.eps = cfg.eps
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), axes=("norm",)) if cfg.kind is NormKind.LAYER else None

    @property
    def parameters(self) -> tuple[jax.Array, jax.Array | None]:
        """Scale and bias, [K] each; an RMSNorm has no bias."""
        return self.scale[...], None if self.bias is None else self.bias[...]

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., K] -> [..., K]."""
        return normalize(x, *self.parameters, eps=self.eps)
