"""Tiny image models, for the tests of this directory."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models import ModelConfig, ResNetConfig, ViTConfig, WeightFormat, YoloConfig
from jaxinfer.models.abstract import Model, merge_model
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    PreprocessingConfig,
)
from jaxinfer.models.leaves import canonical_leaves

DIRECTORY = pathlib.Path(__file__).parents[1] / "goldens/vision"
GOLDENS = sorted(path.parent.name for path in DIRECTORY.glob("*/model.safetensors"))

CLASSIFIER = ResNetConfig(
    labels=("ok", "scratch", "dent"), stem=8, widths=(16, 32), depths=(1, 2), bottleneck=True, image_size=32
)
DETECTOR = YoloConfig(labels=("bolt", "nut"), widths=(4, 8, 8, 16, 16), depths=(1, 1, 1, 1), image_size=64)
TRANSFORMER = ViTConfig(
    labels=("ok", "scratch", "dent", "dirt"),
    embed=16,
    layers=2,
    attention=AttentionConfig(q_heads=2, kv_heads=2, head_dim=8, qkv_bias=True, out_bias=True),
    mlp=MlpConfig(hidden=24, activation=Activation.GELU, bias=True),
    norm=NormConfig(kind=NormKind.LAYER, eps=1e-6),
    image_size=32,
    patch_size=8,
    preprocessing=PreprocessingConfig(mean=(0.25, 0.5, 0.75)),
)


@functools.cache
def build(config: ModelConfig) -> Model:
    """The model with random weights as it makes them itself, without its small programs; not to be changed."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.full(shape, float(name.endswith(".scale")), np.float32)
        deviation = np.prod(shape[:-1]) ** -0.5 if len(shape) == 4 else 0.02
        return (deviation * rng.standard_normal(shape)).astype(np.float32)

    leaves = [jnp.asarray(draw(name, leaf.shape)) for name, leaf in shapes(config).items()]
    return merge_model(config, FLOAT32, leaves)


def images(*shape: int, seed: int = 0) -> np.ndarray:
    """Noise, uint8."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def run_method(method, *arguments):
    """What a model's method returns, as `run`; its weights are no constants of the program."""
    graph, state = nnx.split(method.__self__)
    return run(lambda state, *rest: getattr(nnx.merge(graph, state), method.__name__)(*rest), state, *arguments)


def run(function, *arguments):
    """What a jitted function returns, as numpy; compiled quickly rather than well."""
    compiled = jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
    return jax.tree.map(np.asarray, compiled(*arguments))


FLOAT32 = WeightFormat()


def shapes(config: ModelConfig):
    """The model's leaves by name."""
    return canonical_leaves(config, FLOAT32)
