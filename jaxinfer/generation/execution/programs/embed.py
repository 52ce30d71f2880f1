"""`embed`: an encoder's vectors of a batch of prompts."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.models import EncoderConfig, WeightFormat
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.models.layers.token_adaptation import NO_ADAPTATION, MergeSchedule, TokenAdaptation
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.collectives import use_rules

if TYPE_CHECKING:
    from jaxinfer.models import Encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSizes(Sizes):
    """`batch` rows of `tokens`, which the programs of an encoder's batch have in common."""

    batch: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed(EncoderSizes):
    """Those of the whole encoder in one program."""

    program = "embed"


class EncoderStatic(NamedTuple):
    """All that the program depends on beside the shapes of its arguments."""

    config: EncoderConfig
    weights: WeightFormat
    rules: ShardingRules
    adaptation: TokenAdaptation = NO_ADAPTATION

    @classmethod
    def of(cls, model: LoadedModel, level: int = 0) -> Self:
        """That of a loaded encoder; level: as of `EncoderEngineConfig`."""
        config = model.config
        assert isinstance(config, EncoderConfig)
        merges = MergeSchedule.CONSTANT.merges(-level, config.layers) if level else ()
        return cls(config, model.weights, model.rules, TokenAdaptation(merges=merges))


def build(static: EncoderStatic, sizes: Embed) -> Callable[..., Any]:
    """The function of these sizes."""

    def function(leaves: list[jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
        from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

        with use_rules(static.rules):
            model: Encoder = merge_model(static.config, static.weights, leaves)
            return model.vectors(tokens, positions, static.adaptation)

    return function


def spec(model: LoadedModel, level: int = 0) -> ProgramSpec[Embed, Iterable[tuple[int, int]]]:
    """The program of an engine, whose buckets are pairs of rows and tokens. level: as of `EncoderEngineConfig`."""
    leaves = list(model.leaves.values())

    def arguments(sizes: Embed) -> tuple[Any, ...]:
        shape = jax.ShapeDtypeStruct((sizes.batch, sizes.tokens), jnp.int32)
        return leaves, shape, shape

    return ProgramSpec(
        sizes=Embed,
        build=build,
        static=EncoderStatic.of(model, level),
        arguments=arguments,
        reachable=lambda shapes: (Embed(batch=rows, tokens=length) for rows, length in shapes),
    )
