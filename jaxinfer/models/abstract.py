"""Models with shapes in place of arrays, and how they and their weights come together.

Only this side of a model needs Flax, whose import takes a quarter as long as JAX's: a start that finds its executables
on disk does without (`leaves.py` remembers what such a model has).
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxinfer.checkpoints import Leaf
from jaxinfer.models.config import DecoderConfig, EncoderConfig, ModelConfig, ResNetConfig, ViTConfig, YoloConfig
from jaxinfer.models.text.decoder import Decoder
from jaxinfer.models.text.encoder import Encoder
from jaxinfer.models.vision.resnet import ResNet
from jaxinfer.models.vision.vit import ViT
from jaxinfer.models.vision.yolo import Yolo
from jaxinfer.models.weight_format import WeightFormat

Model = Decoder | Encoder | ResNet | Yolo | ViT


def build_model(config: ModelConfig, weights: WeightFormat, *, rngs: nnx.Rngs) -> Model:
    """Build the model of a config, with random weights."""
    match config:
        case DecoderConfig():
            return Decoder(config, weights, rngs=rngs)
        case EncoderConfig():
            return Encoder(config, weights, rngs=rngs)
        case ResNetConfig():
            return ResNet(config, weights, rngs=rngs)
        case YoloConfig():
            return Yolo(config, weights, rngs=rngs)
        case ViTConfig():
            return ViT(config, weights, rngs=rngs)


def abstract_model(config: ModelConfig, weights: WeightFormat) -> Model:
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: build_model(config, weights, rngs=nnx.Rngs(0)))


@functools.cache
def split_model(config: ModelConfig, weights: WeightFormat) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the abstract model's graph, and the shapes of its leaves."""
    return nnx.split(abstract_model(config, weights))


def state_of(config: ModelConfig, weights: WeightFormat, leaves: Iterable[jax.Array]) -> nnx.State:
    """The state that has these leaves, in the order of `describe_leaves`."""
    return jax.tree.unflatten(jax.tree.structure(split_model(config, weights)[1]), leaves)


def merge_model(config: ModelConfig, weights: WeightFormat, leaves: Iterable[jax.Array]) -> Any:
    """Build the model from these leaves, in the order of `describe_leaves`."""
    return nnx.merge(split_model(config, weights)[0], state_of(config, weights, leaves))


def merge_parts(config: ModelConfig, weights: WeightFormat, parts: Mapping[str, jax.Array]) -> Any:
    """Build the model from these leaves by name, with shapes in place of the others."""
    graph, state = split_model(config, weights)
    leaves = [parts.get(name, leaf) for name, leaf in zip(variables(state), jax.tree.leaves(state), strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def variables(model: nnx.Module | nnx.State) -> dict[str, nnx.Variable]:
    """The parameters by name, in the order of `jax.tree.leaves`."""
    state = model if isinstance(model, nnx.State) else nnx.state(model, nnx.Param)
    return {leaf_name(path): variable for path, variable in nnx.to_flat_state(state)}


def describe_leaves(model: nnx.Module | nnx.State) -> dict[str, Leaf]:
    """Return shape, dtype and logical axes of every leaf, by its name."""
    return {
        name: Leaf(variable.shape, variable.dtype.name, variable.get_metadata("axes"))
        for name, variable in variables(model).items()
    }


def leaf_name(path: tuple[object, ...]) -> str:
    """A parameter's name from its path: `layers.0.mlp.gate_up.weight` for `layers[0].mlp.gate_up.weight`."""
    return ".".join(map(str, path))
