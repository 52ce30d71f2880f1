"""Pooling by attention, as SigLIP has it (arXiv:2303.15343; the head of arXiv:2106.04560, section 3.4)."""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jaxinfer.models.config import ViTConfig
from jaxinfer.models.layers.linear import Embedding, Linear
from jaxinfer.models.layers.mlp import Mlp
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.weight_format import WeightFormat


class AttentionPooling(nnx.Module):
    """y + mlp(norm(y)) with y = attention of one learned query to all tokens, [B, N, D] -> [B, D].

    Attributes:
      query: a single row, already projected: it is the same for all images.
      kv: the projection of all keys, then all values.
    """

    def __init__(self, cfg: ViTConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        embed, whole = cfg.embed, ("embed", "embed")  # not split over devices
        self.heads = cfg.pooling_heads
        table = WeightFormat(dtype=weights.dtype)
        self.query = Embedding(1, embed, table, axes=("positions", "embed"), rngs=rngs)
        self.kv = Linear(embed, 2 * embed, weights, axes=whole, bias=True, rngs=rngs)
        self.out = Linear(embed, embed, weights, axes=whole, bias=True, rngs=rngs)
        self.norm = Norm(embed, cfg.norm)
        self.mlp = Mlp(embed, cfg.mlp, weights, rngs=rngs)

    def __call__(self, x: jax.Array, sizes: jax.Array | None) -> jax.Array:
        """Pool tokens.

        Args:
          x: [B, N, D].
          sizes: how many tokens each of them is the mean of, float32 [B, N]; None: one.
        """
        query = rearrange(self.query.table[0], "(h k) -> h k", h=self.heads).astype(jnp.float32)
        k, v = rearrange(self.kv(x), "b n (two h k) -> two b n h k", two=2, h=self.heads).astype(jnp.float32)
        scores = jnp.einsum("hk,bnhk->bhn", query * query.shape[-1] ** -0.5, k, precision="highest")
        if sizes is not None:
            scores += jnp.log(sizes)[:, None]  # a token of size s is s equal tokens
        heads = jnp.einsum("bhn,bnhk->bhk", jax.nn.softmax(scores), v, precision="highest")
        y = self.out(heads.reshape(len(x), -1).astype(x.dtype))
        return self.mlp.down.linear_residual(self.mlp.hidden(y, self.norm), y)
