"""`embed`: an encoder's vectors of a batch of prompts."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.compiled import ProgramSpec
from jaxinfer.models import Encoder
from jaxinfer.models.loading import LoadedModel


def embed(model: Encoder, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """tokens, positions: int32 [B, T], positions negative for padding. Returns float32 [B, D], of length 1."""
    return model.pool(model(tokens, positions), positions)


def spec(model: LoadedModel) -> ProgramSpec[Iterable[tuple[int, int]]]:
    """Sizes: `batch` rows of `tokens`; buckets are pairs of these."""
    leaves, treedef = jax.tree.flatten(model.state)

    def function(leaves: list[jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
        module = nnx.merge(model.graphdef, jax.tree.unflatten(treedef, leaves))
        assert isinstance(module, Encoder)
        return embed(module, tokens, positions)

    def arguments(sizes):
        shape = jax.ShapeDtypeStruct((sizes["batch"], sizes["tokens"]), jnp.int32)
        return leaves, shape, shape

    return ProgramSpec(
        name="embed",
        function=lambda sizes: function,
        arguments=arguments,
        reachable=lambda shapes: ({"batch": rows, "tokens": length} for rows, length in shapes),
    )
