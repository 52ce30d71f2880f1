"""`embed`: an encoder's vectors of a batch of prompts."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.compiled.spec import shapes_of
from jaxinfer.execution.forward import batch_sharding
from jaxinfer.models import EncoderConfig, WeightFormat
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, MergeSchedule, TokenAdaptation
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.collectives import use_rules

if TYPE_CHECKING:
    from jaxinfer.models import Encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSizes(Sizes):
    """`batch` rows of `tokens`: the sizes that the programs of an encoder's batch share."""

    batch: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed(EncoderSizes):
    """The sizes of the whole encoder in one program."""

    program = "embed"


class EncoderStatic(NamedTuple):
    """Everything the program depends on beside the shapes of its arguments."""

    config: EncoderConfig
    weights: WeightFormat
    rules: ShardingRules
    adaptation: TokenAdaptation = NO_ADAPTATION

    @classmethod
    def from_model(cls, model: LoadedModel, level: int = 0) -> Self:
        """Describe a loaded encoder; level: as in `EncoderEngineConfig`."""
        config = model.config
        assert isinstance(config, EncoderConfig)
        merges = MergeSchedule.CONSTANT.merges(-level, config.layers) if level else ()
        return cls(config, model.weights, model.rules, TokenAdaptation(merges=merges))


def build(static: EncoderStatic, sizes: Embed) -> Callable[..., Any]:
    """Build the function of these sizes."""

    def function(leaves: list[jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
        from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

        with use_rules(static.rules):
            model: Encoder = merge_model(static.config, static.weights, leaves)
            return model.vectors(tokens, positions, static.adaptation)

    return function


def spec(model: LoadedModel, level: int = 0) -> ProgramSpec[Embed, Iterable[tuple[int, int]]]:
    """The spec for an engine, whose buckets are pairs of rows and tokens. level: as in `EncoderEngineConfig`."""
    leaves, sharding = shapes_of(model.leaves.values()), batch_sharding(model.mesh, model.rules)

    def arguments(sizes: Embed) -> tuple[Any, ...]:
        shape = jax.ShapeDtypeStruct((sizes.batch, sizes.tokens), jnp.int32, sharding=sharding)
        return leaves, shape, shape

    return ProgramSpec(
        sizes=Embed,
        build=build,
        static=EncoderStatic.from_model(model, level),
        arguments=arguments,
        reachable=lambda shapes: (Embed(batch=rows, tokens=length) for rows, length in shapes),
        out_shardings=lambda sizes: sharding,
    )
