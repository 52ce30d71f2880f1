"""A tiny vision transformer on disk, and images whose class a head can find in its features."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from jaxinfer.elastic import Dataset, TrainingConfig
from jaxinfer.models import ViT, ViTConfig, WeightFormat
from jaxinfer.models.config import Activation, AttentionConfig, MlpConfig, NormConfig, NormKind
from jaxinfer.models.files.loading import save_model
from tests.tiny import fill

SIZE = 8
CONFIG = ViTConfig(
    labels=("none",),
    image_size=SIZE,
    patch_size=2,
    embed=16,
    layers=2,
    attention=AttentionConfig(q_heads=2, kv_heads=2, head_dim=8, qkv_bias=True, out_bias=True),
    mlp=MlpConfig(hidden=32, activation=Activation.GELU, bias=True),
    norm=NormConfig(kind=NormKind.LAYER, eps=1e-6),
)

SMALL = dataclasses.replace(CONFIG, layers=1, patch_size=4)
"""For commands and examples: few tokens, and so few levels by default."""


def tiny_vit(seed=0, config=CONFIG):
    """With weights large enough that all that happens to tokens shows in the features."""
    return fill(lambda: ViT(config, WeightFormat(), rngs=nnx.Rngs(0)), np.random.default_rng(seed))


def save_vit(path, seed=0, config=CONFIG):
    save_model(path, tiny_vit(seed, config), family="vit")
    return path


_PRODUCTS = 3 * CONFIG.patch_size**2 + CONFIG.embed  # of patches, and of a head
_PRODUCTS += CONFIG.layers * (3 * CONFIG.embed + CONFIG.mlp.hidden + CONFIG.attention.head_dim + CONFIG.patches + 1)
TOLERANCE = 4 * np.finfo(np.float32).eps * _PRODUCTS**0.5
"""Of probabilities, which are at most 1, by the order in which programs add the products that lead to one of them."""

QUICK = TrainingConfig(steps=20, batch=8)
"""Of all tasks that tests register, of 40 images: one shape, for which training is compiled once."""


def stripes(count=40, seed=0, names=("rows", "columns")):
    """Stripes across or along, in noise."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % len(names))  # as many of each: shapes do not depend on the seed
    images = rng.integers(0, 90, (count, SIZE, SIZE, 3))
    for image, label in zip(images, labels, strict=True):
        if label:
            image[:, ::4] += 150
        else:
            image[::4] += 150
    return Dataset(images.astype(np.uint8), labels, names)


def logits(model, adaptation, images, weight, bias, prompts=None):
    """What a task's head gives, straight from the model."""
    if prompts is not None:
        prompts = np.broadcast_to(prompts, (len(images), *prompts.shape))
    features = jax.jit(model.features, static_argnums=1)(images, adaptation, prompts)
    return np.asarray(features) @ weight.T + bias
