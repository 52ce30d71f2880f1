"""Normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import NormConfig, NormKind, QKNormScope
from jaxinfer.pallas_kernels import normalize
from jaxinfer.sharding.collectives import psum


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dimension, computed in float32."""

    def __init__(self, size: int, cfg: NormConfig, *, axis: str = "norm"):
        self.eps = cfg.eps
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), axes=(axis,)) if cfg.kind is NormKind.LAYER else None

    @property
    def parameters(self) -> tuple[jax.Array, jax.Array | None]:
        """Scale and bias, [K] each; an RMSNorm has no bias."""
        return self.scale[...], None if self.bias is None else self.bias[...]

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., K] -> [..., K]."""
        return normalize(x, *self.parameters, eps=self.eps)


@jax.named_scope("norm")
def normalize_heads(x: jax.Array, norm: Norm, scope: QKNormScope, *, heads: int) -> jax.Array:
    """Normalise query or key heads, computed in float32.

    Args:
      x: this device's, [..., Hkv, G, K]; heads that pad are zero.
      norm: with a weight for each feature of this device's heads, [Hkv * G * K]; of scope HEAD [K].
      scope: which features are normalised together.
      heads: how many of all devices' heads are no padding. If keys are copied, all copies.
    Returns: as x.
    """
    shape = (x.shape[-1],) if scope is QKNormScope.HEAD else x.shape[-3:]
    scale, bias = norm.parameters
    exact = x.astype(jnp.float32)
    if scope is QKNormScope.ALL_HEADS:
        mean_square = psum(jnp.sum(exact**2, axis=(-3, -2, -1), keepdims=True), "heads") / (heads * x.shape[-1])
    else:
        if bias is not None:
            exact -= jnp.mean(exact, axis=-1, keepdims=True)
        mean_square = jnp.mean(exact**2, axis=-1, keepdims=True)
    normal = exact * jax.lax.rsqrt(mean_square + norm.eps) * scale.reshape(shape)
    return (normal if bias is None else normal + bias.reshape(shape)).astype(x.dtype)
