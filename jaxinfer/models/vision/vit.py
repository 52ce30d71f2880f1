"""The vision transformer (ViT, arXiv:2010.11929), whose token count can be chosen (OTAS, section III-B).

images -> patches -> class token, registers, patches, with positions -> layers -> norm -> head -> softmax
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax

from jaxinfer.models import devices
from jaxinfer.models.config import ImagePooling, ViTConfig
from jaxinfer.models.layers.layer import TransformerLayer
from jaxinfer.models.layers.linear import Embedding, Linear
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, TokenAdaptation
from jaxinfer.models.vision.attention_pooling import AttentionPooling
from jaxinfer.models.vision.images import check_images, preprocessed
from jaxinfer.models.vision.resampling import position_matrix
from jaxinfer.models.weight_format import WeightFormat


class ViT(nnx.Module):
    """Images to the probability of each class.

    Attributes:
      patches: from the pixels of a patch, row by row, each red, green and blue.
      class_token: a row for each of `class_tokens`; None without any.
      registers: a row for each; None without any.
      positions: a row for each class token, then one for each patch of the grid, row by row.
      norm: after the last layer, of what is pooled.
      attention_pooling: None for every other pooling.
      head: None without labels.
    """

    def __init__(self, cfg: ViTConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg, self.dtype = cfg, weights.dtype
        whole = ("embed", "embed")

        def table(rows: int) -> Embedding:
            plain = WeightFormat(dtype=weights.dtype)  # added, not multiplied: never int8
            return Embedding(rows, cfg.embed, plain, axes=("positions", "embed"), rngs=rngs)

        grid_side = cfg.position_grid.side if cfg.position_grid else cfg.grid_side
        self.patches = Linear(3 * cfg.patch_size**2, cfg.embed, weights, axes=whole, bias=True, rngs=rngs)
        self.class_token = table(cfg.class_tokens) if cfg.class_tokens else None
        self.registers = table(cfg.registers) if cfg.registers else None
        self.positions = table(cfg.class_tokens + grid_side**2)
        self.layers = nnx.List(
            [TransformerLayer(cfg, weights, layer=i, causal=False, rngs=rngs) for i in range(cfg.layers)]
        )
        self.norm = Norm(cfg.embed, cfg.norm)
        by_attention = cfg.pooling is ImagePooling.ATTENTION
        self.attention_pooling = AttentionPooling(cfg, weights, rngs=rngs) if by_attention else None
        classes = len(cfg.labels)
        self.head = Linear(cfg.feature_width, classes, weights, axes=whole, bias=True, rngs=rngs) if classes else None

    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute the probabilities of the classes, float32 [B, classes].

        Args:
          images: uint8 [B, H, W, 3], RGB; those of another size than `cfg.image_size` are resized as
            `cfg.preprocessing` says.
        """
        return jax.nn.softmax(self.logits(images), axis=-1)

    def logits(self, images: jax.Array, adaptation: TokenAdaptation = NO_ADAPTATION) -> jax.Array:
        """Compute the scores whose softmax is the probabilities, float32 [B, classes]; arguments as of `features`.

        Raises ValueError for a model without labels.
        """
        if self.head is None:
            raise ValueError("This vision transformer has no head of classes: it gives vectors (`features`) alone.")
        return self.head(self.features(images, adaptation)).astype(jnp.float32)

    def features(
        self, images: jax.Array, adaptation: TokenAdaptation = NO_ADAPTATION, prompts: jax.Array | None = None
    ) -> jax.Array:
        """Compute the head's input, [B, feature_width].

        Args:
          images: as above.
          adaptation: what happens to the tokens in each layer.
          prompts: those of each layer for each image, [B, layers, adaptation.prompts, D]; None if there are none.
        """
        batch = len(images)
        at_once = devices.inputs_at_once(self.cfg.tokens * self.cfg.embed * self.dtype.itemsize)
        if at_once is None or batch <= at_once or batch % at_once:
            return self._features(images, adaptation, prompts)
        parts = jax.tree.map(lambda array: array.reshape(-1, at_once, *array.shape[1:]), (images, prompts))
        return lax.map(lambda part: self._features(part[0], adaptation, part[1]), parts).reshape(batch, -1)

    def _features(self, images: jax.Array, adaptation: TokenAdaptation, prompts: jax.Array | None) -> jax.Array:
        """Compute the features of all images at once."""
        cfg = self.cfg
        x, sizes, first = adaptation.run_layers(
            self.layers, self.enter(images), prompts=prompts, protected=cfg.first_patch
        )
        return self._pool(x, sizes, first)

    def enter(self, images: jax.Array) -> jax.Array:
        """Cut images into patches and embed them: tokens, [B, cfg.tokens, D]."""
        check_images(images)
        cfg, p = self.cfg, self.cfg.patch_size
        whole = cfg.grid_side * p
        pixels = preprocessed(images, cfg.image_size, cfg.preprocessing)[:, :whole, :whole].astype(self.dtype)
        patches = self.patches(rearrange(pixels, "b (h p) (w q) c -> b (h w) (p q c)", p=p, q=p))
        positions = self._positions()
        x = [patches + positions[cfg.class_tokens :]]
        if self.registers is not None:
            x.insert(0, self._for_each(images, self.registers.table[...]))
        if self.class_token is not None:
            x.insert(0, self._for_each(images, self.class_token.table[...] + positions[: cfg.class_tokens]))
        return jnp.concatenate(x, axis=1)

    @staticmethod
    def _for_each(images: jax.Array, rows: jax.Array) -> jax.Array:
        """[N, D] -> [B, N, D]."""
        return jnp.broadcast_to(rows, (len(images), *rows.shape))

    def _positions(self) -> jax.Array:
        """The positions of class tokens and patches; those of patches are interpolated to the images' grid."""
        table, cfg = self.positions.table[...], self.cfg
        if cfg.position_grid is None or cfg.position_grid.side == cfg.grid_side:
            return table
        matrix, side = position_matrix(cfg.position_grid, cfg.grid_side), cfg.position_grid.side
        grid = table[cfg.class_tokens :].astype(jnp.float32).reshape(side, side, -1)
        grid = jnp.einsum("ih,jw,hwd->ijd", matrix, matrix, grid, precision="highest")
        return jnp.concatenate((table[: cfg.class_tokens], grid.reshape(cfg.patches, -1).astype(table.dtype)))

    def _pool(self, x: jax.Array, sizes: jax.Array | None, first: int) -> jax.Array:
        """[B, N, D] -> [B, feature_width].

        sizes: of the tokens, float32 [B, N]; None: all are 1. first: the first token that is made of patches.
        """
        match self.cfg.pooling:
            case ImagePooling.CLS:
                return self.norm(x[:, 0])
            case ImagePooling.MEAN:
                return self.norm(self._mean(x, sizes, first))
            case ImagePooling.NORMED_MEAN:
                return self._mean(self.norm(x), sizes, first)
            case ImagePooling.CLS_AND_MEAN:
                x = self.norm(x)
                return jnp.concatenate((x[:, 0], self._mean(x, sizes, first)), axis=-1)
            case ImagePooling.CLASS_TOKENS:
                return self.norm(x[:, : self.cfg.class_tokens]).reshape(len(x), -1)
            case ImagePooling.ATTENTION:
                assert self.attention_pooling is not None
                return self.attention_pooling(self.norm(x[:, first:]), None if sizes is None else sizes[:, first:])

    def _mean(self, x: jax.Array, sizes: jax.Array | None, first: int) -> jax.Array:
        """Average over all patches, [B, N, D] -> [B, D]; arguments as of `_pool`."""
        of_patches = x[:, first:].astype(jnp.float32)
        if sizes is None:
            return of_patches.mean(1).astype(self.dtype)
        weights = sizes[:, first:, None] / self.cfg.patches
        return jnp.sum(of_patches * weights, axis=1).astype(self.dtype)
