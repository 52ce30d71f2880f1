"""How many tokens a layer works on: prompts that are added, tokens that are merged (OTAS, section III-B and Fig. 6).

A level of OTAS (its gamma) is a `TokenAdaptation`: what happens in each layer, fixed before anything is compiled.
Prompts come before the layer's first norm, merging (`pallas_kernels.merge_tokens`) between its attention and its MLP.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxinfer.fields import Finite, SizeOrZero, check_fields
from jaxinfer.models.layers.forward_context import ForwardContext, RowKeys, TokenRows
from jaxinfer.pallas_kernels import merge_tokens

if TYPE_CHECKING:
    from jaxinfer.models.layers.layer import TransformerLayer


class PromptMode(enum.StrEnum):
    """Whether the next layer replaces a layer's prompts or adds its own."""

    REPLACE = "replace"  # the next layer's take their places (VPT-deep, arXiv:2203.12119)
    ACCUMULATE = "accumulate"  # they stay, and the next layer's are added (OTAS)


class MergeSchedule(enum.StrEnum):
    """How many tokens each layer merges at level -r (ToMe, arXiv:2210.09461, section 4.1)."""

    CONSTANT = "constant"  # r
    DECREASING = "decreasing"  # from 2r in the first layer to 0 in the last

    def merges(self, r: int, layers: int) -> tuple[int, ...]:
        """Return how many tokens each layer merges.

        >>> MergeSchedule.DECREASING.merges(4, 5)
        (8, 6, 4, 2, 0)
        """
        if self is MergeSchedule.CONSTANT or layers == 1:
            return (r,) * layers
        return tuple(2 * r * (layers - 1 - layer) // (layers - 1) for layer in range(layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenAdaptation:
    """Changes to the tokens in each layer. Without arguments: none.

    Attributes:
      prompts: tokens that are added in each layer.
      prompt_mode: what becomes of them in the next one.
      merges: tokens that each layer merges into others, at most half of those that are not protected; empty: none.
      protect_isolated: as of `merge_tokens`.
    """

    prompts: SizeOrZero = 0
    prompt_mode: PromptMode = PromptMode.REPLACE
    merges: tuple[SizeOrZero, ...] = ()
    protect_isolated: Finite | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def counts(self, tokens: int, layers: int, *, protected: int = 1) -> list[tuple[int, int]]:
        """Count the tokens that attention and the MLP of each layer work on.

        Args:
          tokens: before the first layer.
          layers: how many there are.
          protected: the first ones, which are not merged; prompts are not either.

        >>> TokenAdaptation(merges=(16,) * 12).counts(197, 12)[-2:]
        [(37, 21), (21, 11)]
        """
        counts = []
        for layer in range(layers):
            if self._adds_prompts(layer):
                tokens, protected = tokens + self.prompts, protected + self.prompts
            r = min(self._merged(layer), max(0, tokens - protected) // 2)
            counts.append((tokens, tokens - r))
            tokens -= r
        return counts

    def _merged(self, layer: int) -> int:
        return self.merges[layer] if self.merges else 0

    def _adds_prompts(self, layer: int) -> bool:
        """Tell whether a layer has more prompts than the one before."""
        return self.prompts > 0 and (layer == 0 or self.prompt_mode is PromptMode.ACCUMULATE)

    def run_layers(
        self,
        layers: "Iterable[TransformerLayer]",
        x: jax.Array,
        *,
        prompts: jax.Array | None = None,
        sizes: jax.Array | None = None,
        protected: int = 1,
    ) -> tuple[jax.Array, jax.Array | None, int]:
        """Run all layers of an encoder.

        Args:
          layers: of the model, whose tokens all see one another.
          x: the tokens, [B, T, D].
          prompts: those of each layer for each row, [B, layers, self.prompts, D]; None if there are none.
          sizes: float32 [B, T], 0 for padding, else 1; None: no padding.
          protected: the first tokens, which are not merged (1: the class token); prompts come after them.
        Returns: tokens [B, N, D]; their sizes, float32 [B, N], or None where all are 1; and how many come first that
          are protected.
        """
        if (prompts is None) != (self.prompts == 0):
            raise ValueError(
                f"{self.prompts} prompts a layer are needed, got {None if prompts is None else prompts.shape}."
            )
        first = protected  # where prompts are
        for index, layer in enumerate(layers):
            if prompts is not None:
                kept = x[:, first:] if self._adds_prompts(index) else x[:, first + self.prompts :]
                if self._adds_prompts(index):
                    protected += self.prompts
                    sizes = _with_prompts(sizes, self.prompts, first)
                x = jnp.concatenate((x[:, :first], prompts[:, index].astype(x.dtype), kept), axis=1)
            context = _context(x, sizes)
            r = min(self._merged(index), max(0, x.shape[1] - protected) // 2)
            if r == 0:
                x, _ = layer(x, context)
                continue
            assert layer.attention is not None
            heads, rows = layer.attention.heads(x, layer.norm_before_attention, context)
            assert isinstance(rows, RowKeys), "without a cache attention returns its keys"
            x = layer.add_attention(x, heads)
            x, sizes = self._merge(x, sizes, layer.attention.mean_key(rows.k), r, protected)
            x = layer.add_mlp(x)
        return x, sizes, protected

    def _merge(
        self, x: jax.Array, sizes: jax.Array | None, keys: jax.Array, r: int, protected: int
    ) -> tuple[jax.Array, jax.Array]:
        """Run `merge_tokens` past the protected tokens after the first one, which it would move."""
        merge = functools.partial(merge_tokens, protect_isolated=self.protect_isolated)
        if protected <= 1:
            return merge(x, sizes, keys, r, protected=protected)
        sizes = jnp.ones(x.shape[:2], jnp.float32) if sizes is None else sizes

        def rest(array: jax.Array) -> jax.Array:
            return jnp.concatenate((array[:, :1], array[:, protected:]), axis=1)

        def among_protected(merged: jax.Array, before: jax.Array) -> jax.Array:
            return jnp.concatenate((merged[:, :1], before[:, 1:protected], merged[:, 1:]), axis=1)

        merged, merged_sizes = merge(rest(x), rest(sizes), rest(keys), r, protected=1)
        return among_protected(merged, x), among_protected(merged_sizes, sizes)


NO_ADAPTATION = TokenAdaptation()
"""Level 0: the plain model."""


def _context(x: jax.Array, sizes: jax.Array | None) -> ForwardContext:
    places = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    context = ForwardContext.from_groups((TokenRows(places, places),), ())
    return context._replace(key_sizes=sizes, padded=False)


def _with_prompts(sizes: jax.Array | None, prompts: int, first: int) -> jax.Array | None:
    """Insert ones after the first sizes of each row."""
    if sizes is None:
        return None
    ones = jnp.ones((sizes.shape[0], prompts), sizes.dtype)
    return jnp.concatenate((sizes[:, :first], ones, sizes[:, first:]), axis=1)
