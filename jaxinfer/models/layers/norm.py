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
def normalize_heads(
    parts: tuple[jax.Array, jax.Array], norms: tuple[Norm, Norm], scope: QKNormScope, *, heads: tuple[int, int]
) -> list[jax.Array]:
    """Normalise queries and keys before they are rotated, computed in float32.

    Args:
      parts: heads on this device, [..., Hkv, G, K] and [..., Hkv, 1, K]; those that pad are zero.
      norms: of queries and of keys, with a weight for each feature of these heads, or of scope HEAD for each of one.
      scope: which features are normalised together.
      heads: how many query heads and key heads all devices have without padding. If keys are copied, all copies.
    Returns: as parts.
    """
    if scope is QKNormScope.HEAD:
        return [norm(part) for norm, part in zip(norms, parts, strict=True)]
    exact = [x.astype(jnp.float32) for x in parts]
    if scope is QKNormScope.ALL_HEADS:
        sums = psum(jnp.stack([jnp.sum(x**2, axis=(-3, -2, -1), keepdims=True) for x in exact]), "heads")
        squares = [total / (count * parts[0].shape[-1]) for total, count in zip(sums, heads, strict=True)]
    else:
        if norms[0].bias is not None:
            exact = [x - jnp.mean(x, axis=-1, keepdims=True) for x in exact]
        squares = [jnp.mean(x**2, axis=-1, keepdims=True) for x in exact]
    normal = []
    for x, square, norm, part in zip(exact, squares, norms, parts, strict=True):
        scale, bias = norm.parameters
        x = x * jax.lax.rsqrt(square + norm.eps) * scale.reshape(part.shape[-3:])
        normal.append((x if bias is None else x + bias.reshape(part.shape[-3:])).astype(part.dtype))
    return normal
