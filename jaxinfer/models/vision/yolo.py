"""The object detector: YOLOv5, version 6 of its architecture and later, for inference, batch normalisation folded.

    images -> backbone: stem, four stages, pooling -> neck: top down, bottom up -> boxes of three grids -> NMS

Numbers in comments are those of the layers in the published architecture, by which checkpoints name them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.config import STRIDES, YoloConfig
from jaxinfer.models.layers.convolution import Conv, max_pool
from jaxinfer.models.vision.images import Letterbox, check_images, letterboxed_pixels
from jaxinfer.models.vision.suppression import Detections, suppress
from jaxinfer.models.weight_format import WeightFormat


class Yolo(nnx.Module):
    """Images to boxes, with a class and a score each."""

    def __init__(self, cfg: YoloConfig, weights: WeightFormat, *, rngs: nnx.Rngs):
        def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> ConvSiLU:
            return ConvSiLU(inputs, outputs, weights, size=size, stride=stride, rngs=rngs)

        def csp(inputs: int, outputs: int, depth: int = cfg.depths[0], *, residual: bool = False) -> "CSP":
            return CSP(inputs, outputs, weights, depth=depth, residual=residual, rngs=rngs)

        self.cfg, self.dtype = cfg, weights.dtype
        w = cfg.widths
        self.stem = ConvSiLU(3, w[0], weights, size=6, stride=2, padding=2, rngs=rngs)  # 0
        self.downs = nnx.List([conv(w[i], w[i + 1], 3, 2) for i in range(4)])  # 1, 3, 5, 7
        self.stages = nnx.List([csp(w[i + 1], w[i + 1], cfg.depths[i], residual=True) for i in range(4)])  # 2, 4, 6, 8
        self.pooling = PyramidPooling(w[4], weights, rngs=rngs)  # 9
        self.lateral5, self.lateral4 = conv(w[4], w[3], 1), conv(w[3], w[2], 1)  # 10, 14
        self.top_down4, self.top_down3 = csp(2 * w[3], w[3]), csp(2 * w[2], w[2])  # 13, 17
        self.down3, self.down4 = conv(w[2], w[2], 3, 2), conv(w[3], w[3], 3, 2)  # 18, 21
        self.bottom_up4, self.bottom_up5 = csp(2 * w[2], w[3]), csp(2 * w[3], w[4])  # 20, 23
        outputs = len(cfg.anchors[0]) * (5 + len(cfg.labels))
        self.heads = nnx.List([Conv(width, outputs, weights, rngs=rngs) for width in w[2:]])  # 24

    def __call__(self, images: jax.Array) -> Detections:
        """The detections of each image, best first; boxes in the pixels of the images.

        Args:
          images: uint8 [B, H, W, 3], RGB; letterboxed to `cfg.image_size`.
        """
        _, height, width, _ = images.shape
        box = Letterbox.fit(height, width, self.cfg.image_size)
        detections = suppress(self.predictions(images), confidence=self.cfg.confidence, iou=self.cfg.iou)
        corners = (detections.boxes - np.array([box.left, box.top] * 2, np.float32)) / box.scale
        corners = jnp.clip(corners, 0, np.array([width, height] * 2, np.float32))
        valid = jnp.arange(corners.shape[1]) < detections.count[:, None]
        return dataclasses.replace(detections, boxes=jnp.where(valid[..., None], corners, 0))

    def predictions(self, images: jax.Array) -> jax.Array:
        """Compute a candidate for each anchor of each cell, float32 [B, candidates, 5 + classes]; images as above.

        Columns: the box's centre (x, y) and size (w, h) in pixels of the letterboxed image, whether there is an object,
        and whether it is of each class, both in (0, 1).
        """
        check_images(images)
        x = self.stem(letterboxed_pixels(images, self.cfg.image_size).astype(self.dtype))
        levels = []
        for down, stage in zip(self.downs, self.stages, strict=True):
            x = stage(down(x))
            levels.append(x)
        _, p3, p4, p5 = levels
        top5 = self.lateral5(self.pooling(p5))
        top4 = self.lateral4(self.top_down4(_joined(_doubled(top5), p4)))
        out3 = self.top_down3(_joined(_doubled(top4), p3))
        out4 = self.bottom_up4(_joined(self.down3(out3), top4))
        out5 = self.bottom_up5(_joined(self.down4(out4), top5))
        grids = zip(self.heads, (out3, out4, out5), STRIDES, self.cfg.anchors, strict=True)
        return jnp.concatenate([_decode(head(x), stride, anchors) for head, x, stride, anchors in grids], axis=1)


class ConvSiLU(Conv):
    """A convolution followed by SiLU."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.silu(super().__call__(x))


class Bottleneck(nnx.Module):
    """Two convolutions of one width, 1x1 and 3x3; x is added to what they make of it if `residual`."""

    def __init__(self, width: int, weights: WeightFormat, *, residual: bool, rngs: nnx.Rngs):
        self.residual = residual
        self.conv1 = ConvSiLU(width, width, weights, rngs=rngs)
        self.conv2 = ConvSiLU(width, width, weights, size=3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv2(self.conv1(x))
        return x + y if self.residual else y


class CSP(nnx.Module):
    """Half of the outputs' width through bottlenecks and half past them, joined by a 1x1 convolution ("C3")."""

    def __init__(self, inputs: int, outputs: int, weights: WeightFormat, *, depth: int, residual: bool, rngs: nnx.Rngs):
        half = outputs // 2
        self.conv1, self.conv2 = (ConvSiLU(inputs, half, weights, rngs=rngs) for _ in range(2))
        self.conv3 = ConvSiLU(2 * half, outputs, weights, rngs=rngs)
        self.blocks = nnx.List([Bottleneck(half, weights, residual=residual, rngs=rngs) for _ in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv1(x)
        for block in self.blocks:
            y = block(y)
        return self.conv3(_joined(y, self.conv2(x)))


class PyramidPooling(nnx.Module):
    """Features joined with their maxima over 5x5, 9x9 and 13x13 places, each the 5x5 maximum of the last ("SPPF")."""

    def __init__(self, width: int, weights: WeightFormat, *, rngs: nnx.Rngs):
        half = width // 2
        self.conv1 = ConvSiLU(width, half, weights, rngs=rngs)
        self.conv2 = ConvSiLU(4 * half, width, weights, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = [self.conv1(x)]
        for _ in range(3):
            pooled.append(max_pool(pooled[-1], size=5))
        return self.conv2(_joined(*pooled))


def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=-1)


def _doubled(x: jax.Array) -> jax.Array:
    """Repeat each place in both directions."""
    return x.repeat(2, axis=1).repeat(2, axis=2)


def _decode(outputs: jax.Array, stride: int, anchors: tuple[tuple[float, float], ...]) -> jax.Array:
    """Decode a grid into candidates: [B, h, w, anchors * (5 + classes)] -> [B, h * w * anchors, 5 + classes].

    With s the sigmoid of an output: centre = (2 s - 0.5 + cell) stride, size = (2 s)^2 anchor.
    """
    batch, height, width, _ = outputs.shape
    s = jax.nn.sigmoid(outputs.astype(jnp.float32)).reshape(batch, height, width, len(anchors), -1)
    cells = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1).astype(np.float32)
    centres = (2 * s[..., :2] - 0.5 + cells[:, :, None]) * stride
    sizes = (2 * s[..., 2:4]) ** 2 * np.asarray(anchors, np.float32)
    return jnp.concatenate((centres, sizes, s[..., 4:]), axis=-1).reshape(batch, -1, s.shape[-1])
