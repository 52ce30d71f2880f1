"""The image classifier: ResNet (arXiv:1512.03385), for inference, batch normalisation folded.

images -> stem 7x7/2 -> max pool 3x3/2 -> stages of blocks -> mean over all places -> head -> softmax
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ResNetConfig
from jaxinfer.models.layers.convolution import Conv, max_pool
from jaxinfer.models.layers.linear import Linear
from jaxinfer.models.vision.images import check_images, preprocessed
from jaxinfer.models.weight_format import WeightFormat


class ResNet(nnx.Module):
    """Images to the probability of each class."""

    def __init__(self, cfg: ResNetConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        self.cfg, self.dtype = cfg, weights.dtype
        self.stem = Conv(3, cfg.stem, weights, size=7, stride=2, rngs=rngs)
        inputs = (cfg.stem, *cfg.widths)
        self.stages = nnx.List(
            [
                nnx.List(
                    [
                        Block(
                            inputs[stage] if first else width,
                            width,
                            weights,
                            bottleneck=cfg.bottleneck,
                            stride=2 if first and (stage or cfg.stride_in_first_stage) else 1,
                            stride_in_first_conv=cfg.stride_in_first_conv,
                            rngs=rngs,
                        )
                        for first in [True] + [False] * (depth - 1)
                    ]
                )
                for stage, (width, depth) in enumerate(zip(cfg.widths, cfg.depths, strict=True))
            ]
        )
        whole = ("embed", "embed")  # not split over devices
        self.head = Linear(cfg.widths[-1], len(cfg.labels), weights, axes=whole, bias=True, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute the probabilities of the classes, float32 [B, classes].

        Args:
          images: uint8 [B, H, W, 3], RGB; those of another size than `cfg.image_size` are resized as
            `cfg.preprocessing` says.
        """
        return jax.nn.softmax(self.logits(images), axis=-1)

    def logits(self, images: jax.Array) -> jax.Array:
        """Compute the scores whose softmax is the probabilities, float32 [B, classes]; images as above."""
        return self.head(self.features(images)).astype(jnp.float32)

    def features(self, images: jax.Array) -> jax.Array:
        """Compute the head's input, the last stage's means over all places, [B, widths[-1]]; images as above."""
        check_images(images)
        x = preprocessed(images, self.cfg.image_size, self.cfg.preprocessing).astype(self.dtype)
        x = max_pool(nnx.relu(self.stem(x)), size=3, stride=2)
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x.astype(jnp.float32).mean((1, 2)).astype(self.dtype)


class Block(nnx.Module):
    """Convolutions of x added to x, [B, H, W, inputs] -> [B, H / stride, W / stride, outputs].

    The stride is that of the first 3x3 convolution, or (`stride_in_first_conv`) of a bottleneck's first one. Where the
    shape changes, x is projected.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        weights: WeightFormat,
        *,
        bottleneck: bool,
        stride: int,
        stride_in_first_conv: bool,
        rngs: nnx.Rngs,
    ):
        def conv(n_in: int, n_out: int, size: int, stride: int = 1) -> Conv:
            return Conv(n_in, n_out, weights, size=size, stride=stride, rngs=rngs)

        if bottleneck:
            inner = outputs // 4
            strides = (stride, 1) if stride_in_first_conv else (1, stride)
            convs = [conv(inputs, inner, 1, strides[0]), conv(inner, inner, 3, strides[1]), conv(inner, outputs, 1)]
        else:
            convs = [conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3)]
        self.convs = nnx.List(convs)
        self.shortcut = conv(inputs, outputs, 1, stride) if inputs != outputs or stride > 1 else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for conv in self.convs[:-1]:
            y = nnx.relu(conv(y))
        return nnx.relu(self.convs[-1](y) + (x if self.shortcut is None else self.shortcut(x)))
