"""`embed`: an encoder's vectors of a batch of prompts."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.models import EncoderConfig, WeightFormat
from jaxinfer.models.loading import LoadedModel
from jaxinfer.models.token_adaptation import NO_ADAPTATION, MergeSchedule, TokenAdaptation
from sharding import ShardingRules
from sharding.collectives import use_rules

if TYPE_CHECKING:
    from jaxinfer.models import Encoder


class EncoderStatic(NamedTuple):
    """All that the program depends on beside the shapes of its arguments."""

    config: EncoderConfig
    weights: WeightFormat
    rules: ShardingRules
    adaptation: TokenAdaptation = NO_ADAPTATION

    @classmethod
    def of(cls, model: LoadedModel, level: int = 0) -> Self:
        """That of a loaded encoder; level: as of `EngineConfig`."""
        config = model.config
        assert isinstance(config, EncoderConfig)
        merges = MergeSchedule.CONSTANT.merges(-level, config.layers) if level else ()
        return cls(config, model.weights, model.rules, TokenAdaptation(merges=merges))


def build(static: EncoderStatic, sizes: Sizes) -> Callable[..., Any]:
    """The function of these sizes."""

    def function(leaves: list[jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
        from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

        with use_rules(static.rules):
            model: Encoder = merge_model(static.config, static.weights, leaves)
            return model.vectors(tokens, positions, static.adaptation)

    return function


def spec(model: LoadedModel, level: int = 0) -> ProgramSpec[Iterable[tuple[int, int]]]:
    """Sizes: `batch` rows of `tokens`; buckets are pairs of these. level: as of `EngineConfig`."""
    leaves = list(model.leaves.values())

    def arguments(sizes):
        shape = jax.ShapeDtypeStruct((sizes["batch"], sizes["tokens"]), jnp.int32)
        return leaves, shape, shape

    return ProgramSpec(
        name="embed",
        build=build,
        static=EncoderStatic.of(model, level),
        arguments=arguments,
        reachable=lambda shapes: ({"batch": rows, "tokens": length} for rows, length in shapes),
    )
