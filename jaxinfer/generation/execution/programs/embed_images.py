"""`embed_images`: a vision transformer's vectors of a batch of images."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.compiled import ProgramSpec
from jaxinfer.compiled.spec import shapes_of
from jaxinfer.execution.forward import BatchSize, batch_sharding
from jaxinfer.models import ViTConfig, WeightFormat
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.models.layers.token_adaptation import MergeSchedule, TokenAdaptation
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.collectives import use_rules

if TYPE_CHECKING:
    from jaxinfer.models import ViT


class EmbedImages(BatchSize):
    """A batch of images."""

    program = "embed_images"


class _Static(NamedTuple):
    """Everything the program depends on beside the shapes of its arguments."""

    config: ViTConfig
    weights: WeightFormat
    rules: ShardingRules
    adaptation: TokenAdaptation


def _build(static: _Static, sizes: EmbedImages) -> Callable[..., Any]:
    """Build the function of these sizes: leaves, uint8 [B, size, size, 3] -> float32 [B, feature_width]."""

    def function(leaves: list[jax.Array], images: jax.Array) -> jax.Array:
        from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

        with use_rules(static.rules):
            model: ViT = merge_model(static.config, static.weights, leaves)
            features = model.features(images, static.adaptation).astype(jnp.float32)
            return features / jnp.linalg.norm(features, axis=-1, keepdims=True)

    return function


def spec(model: LoadedModel, level: int) -> ProgramSpec[EmbedImages, Iterable[int]]:
    """The spec, whose buckets are batch sizes.

    Args:
      model: a vision transformer.
      level: -r: each layer merges r tokens; 0: none.
    """
    config, leaves = model.config, shapes_of(model.leaves.values())
    sharding = batch_sharding(model.mesh, model.rules)
    assert isinstance(config, ViTConfig)
    merges = MergeSchedule.CONSTANT.merges(-level, config.layers) if level else ()

    def arguments(sizes: EmbedImages) -> tuple[Any, ...]:
        size = config.image_size
        return leaves, jax.ShapeDtypeStruct((sizes.batch, size, size, 3), jnp.uint8, sharding=sharding)

    return ProgramSpec(
        sizes=EmbedImages,
        build=_build,
        static=_Static(config, model.weights, model.rules, TokenAdaptation(merges=merges)),
        arguments=arguments,
        reachable=lambda sizes: (EmbedImages(batch=size) for size in sizes),
        out_shardings=lambda sizes: sharding,
    )
