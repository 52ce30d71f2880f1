"""`embed`: an encoder's vectors of a batch of prompts."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.models import EncoderConfig, WeightFormat
from jaxinfer.models.loading import LoadedModel
from sharding import ShardingRules
from sharding.collectives import use_rules

if TYPE_CHECKING:
    from jaxinfer.models import Encoder


def embed(model: "Encoder", tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """tokens, positions: int32 [B, T], positions negative for padding. Returns float32 [B, D], of length 1."""
    return model.pool(model(tokens, positions), positions)


class EncoderStatic(NamedTuple):
    """All that the program depends on beside the shapes of its arguments."""

    config: EncoderConfig
    weights: WeightFormat
    rules: ShardingRules

    @classmethod
    def of(cls, model: LoadedModel) -> Self:
        """That of a loaded encoder."""
        assert isinstance(model.config, EncoderConfig)
        return cls(model.config, model.weights, model.rules)


def build(static: EncoderStatic, sizes: Sizes) -> Callable[..., Any]:
    """The function of these sizes."""

    def function(leaves: list[jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
        from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

        with use_rules(static.rules):
            return embed(merge_model(static.config, static.weights, leaves), tokens, positions)

    return function


def spec(model: LoadedModel) -> ProgramSpec[Iterable[tuple[int, int]]]:
    """Sizes: `batch` rows of `tokens`; buckets are pairs of these."""
    leaves = list(model.leaves.values())

    def arguments(sizes):
        shape = jax.ShapeDtypeStruct((sizes["batch"], sizes["tokens"]), jnp.int32)
        return leaves, shape, shape

    return ProgramSpec(
        name="embed",
        build=build,
        static=EncoderStatic.of(model),
        arguments=arguments,
        reachable=lambda shapes: ({"batch": rows, "tokens": length} for rows, length in shapes),
    )
