"""The vision transformer (ViT, arXiv:2010.11929), whose token count can be chosen (OTAS, section III-B).

images -> patches -> class token + patches + positions -> layers -> norm -> head -> softmax
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax

from jaxinfer.models import devices
from jaxinfer.models.config import Pooling, ViTConfig
from jaxinfer.models.layers.layer import TransformerLayer
from jaxinfer.models.layers.linear import Embedding, Linear
from jaxinfer.models.layers.norm import Norm
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, TokenAdaptation
from jaxinfer.models.vision.images import check_images, normalised_pixels
from jaxinfer.models.weight_format import WeightFormat


class ViT(nnx.Module):
    """Images to the probability of each class.

    Attributes:
      patches: from the pixels of a patch, row by row, each red, green and blue.
      class_token: a single row.
      positions: a row for the class token, then one for each patch, row by row.
      norm: after the last layer, of what is pooled.
    """

    def __init__(self, cfg: ViTConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg, self.dtype = cfg, weights.dtype
        whole, table = ("embed", "embed"), WeightFormat(dtype=weights.dtype)  # added, not multiplied: never int8
        self.patches = Linear(3 * cfg.patch_size**2, cfg.embed, weights, axes=whole, bias=True, rngs=rngs)
        self.class_token = Embedding(1, cfg.embed, table, axes=("positions", "embed"), rngs=rngs)
        self.positions = Embedding(cfg.tokens, cfg.embed, table, axes=("positions", "embed"), rngs=rngs)
        self.layers = nnx.List(
            [TransformerLayer(cfg, weights, layer=i, causal=False, rngs=rngs) for i in range(cfg.layers)]
        )
        self.norm = Norm(cfg.embed, cfg.norm)
        self.head = Linear(cfg.embed, len(cfg.labels), weights, axes=whole, bias=True, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the probabilities of the classes, float32 [B, classes].

        Args:
          images: uint8 [B, H, W, 3], RGB; resized to `cfg.image_size` if they have another size.
        """
        return jax.nn.softmax(self.logits(images), axis=-1)

    def logits(self, images: jax.Array, adaptation: TokenAdaptation = NO_ADAPTATION) -> jax.Array:
        """Return the scores whose softmax is the probabilities, float32 [B, classes]; arguments as of `features`."""
        return self.head(self.features(images, adaptation)).astype(jnp.float32)

    def features(
        self, images: jax.Array, adaptation: TokenAdaptation = NO_ADAPTATION, prompts: jax.Array | None = None
    ) -> jax.Array:
        """Return the head's input, [B, D].

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
        x, sizes, protected = adaptation.run_layers(
            self.layers, self.enter(images), self.cfg.positions, prompts=prompts
        )
        return self.norm(self._pool(x, sizes, protected))

    def enter(self, images: jax.Array) -> jax.Array:
        """Cut images into patches and embed them: tokens, [B, 1 + patches, D]."""
        check_images(images)
        cfg = self.cfg
        pixels = normalised_pixels(images, cfg.image_size, cfg.pixel_mean, cfg.pixel_deviation).astype(self.dtype)
        p = cfg.patch_size
        patches = self.patches(rearrange(pixels, "b (h p) (w q) c -> b (h w) (p q c)", p=p, q=p))
        positions = self.positions.table[...]
        first = jnp.broadcast_to(self.class_token.table[...] + positions[:1], (len(images), 1, cfg.embed))
        return jnp.concatenate((first, patches + positions[1:]), axis=1)

    def _pool(self, x: jax.Array, sizes: jax.Array | None, protected: int) -> jax.Array:
        """[B, N, D] -> [B, D]."""
        match self.cfg.pooling:
            case Pooling.CLS:
                return x[:, 0]
            case Pooling.MEAN:
                of_patches = x[:, protected:].astype(jnp.float32)
                if sizes is None:
                    return of_patches.mean(1).astype(self.dtype)
                weights = sizes[:, protected:, None] / self.cfg.patches
                return jnp.sum(of_patches * weights, axis=1).astype(self.dtype)
