"""The inputs of a forward pass, and all that its layers share.

Linears work on the N tokens of all groups together (`pack`), attention on each group by itself (`unpack`).
"""

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.models.config import PositionKind, PositionsConfig
from jaxinfer.models.layers.low_rank import NO_DELTAS, AdapterDeltas, LayerAdapters
from jaxinfer.models.layers.rotary import rotary_table
from jaxinfer.pallas_kernels import KVPages, RecurrentState

if TYPE_CHECKING:
    from jaxinfer.pallas_kernels.moe import Routing


class RowKeys(NamedTuple):
    """The keys and values of a pass whose rows attend to themselves alone: in place of a cache.

    Attributes:
      k, v: of this device's heads, [B, T, Hkv, K].
    """

    k: jax.Array
    v: jax.Array


Cache = KVPages | RecurrentState | RowKeys
"""The memory of a layer for earlier tokens: keys and values in pages, a state for each slot, or of this pass alone."""


class TokenRows(NamedTuple):
    """A group of tokens: B rows of T. A forward pass takes one or several groups.

    Attributes:
      ids: int32 [B, T].
      positions: int32 [B, T], the position of each token in its request, negative for padding. Without a cache they
        are 0, 1, ... and padding comes last.
      page_table: int32 [B, P], the pages of each row's context in order; None without a cache. Rows may share pages
        or be chunks of one request: a layer writes all its keys and values before it reads any.
      adapter: int32 [B], the adapter slot of each row, counted from 1; 0 is none. None: no row has one.
      slot: int32 [B], the slot of each row's request, which has its recurrent states; None without a cache.
      layer_inputs: [B, T, layers, P], what each layer takes of a second table; None: there is none.
    """

    ids: jax.Array
    positions: jax.Array
    page_table: jax.Array | None = None
    adapter: jax.Array | None = None
    slot: jax.Array | None = None
    layer_inputs: jax.Array | None = None


class ForwardContext(NamedTuple):
    """All that the layers of one forward pass share.

    Attributes:
      groups: the rows of tokens; their shapes say how `unpack` divides the N packed tokens.
      rotary: for each kind of rotary positions that layers go by, cos and sin for each group, float32
        [B, T, 1, rotary_dim / 2].
      adapter_one_hot: [N, S], 1 at the slot of each token's adapter; None without adapters.
      key_sizes: of a single group without a cache, how many tokens each of its tokens is the mean of, float32 [B, T], 0
        for padding; None: one, and padding comes last.
      padded: whether a group without a cache may have padding.
      routings: a list to which every layer with experts adds its choices while the pass is traced; None: it does not.
      layer_input: of the layer that runs, [N, P]; None: it takes none.
      speculates: whether all tokens of a row but its first are guesses, which may turn out wrong.
    """

    groups: tuple[TokenRows, ...]
    rotary: Mapping[PositionsConfig, tuple[tuple[jax.Array, jax.Array], ...]]
    adapter_one_hot: jax.Array | None = None
    key_sizes: jax.Array | None = None
    padded: bool = True
    routings: "list[Routing] | None" = None
    layer_input: jax.Array | None = None
    speculates: bool = False

    @classmethod
    def from_groups(
        cls,
        groups: tuple[TokenRows, ...],
        positions: Iterable[PositionsConfig],
        adapters: LayerAdapters | None = None,
        *,
        speculates: bool = False,
    ) -> Self:
        """Make the context of a pass over these groups.

        Args:
          groups: rows of tokens.
          positions: those that its layers go by.
          adapters: of any layer, which give the number of adapter slots; None: there are none.
          speculates: as in the context.
        """
        rotary = {
            config: tuple(rotary_table(config, group.positions) for group in groups)
            for config in positions
            if config.kind is PositionKind.ROTARY
        }
        context = cls(groups, rotary, speculates=speculates)
        if adapters is None:
            return context
        slots = len(adapters.qkv.a)
        return context._replace(adapter_one_hot=pack(_adapter_one_hot(group, slots) for group in groups))

    def of_layer(self, layer: jax.Array | int) -> Self:
        """The context of one layer, by its number in the model, with what it takes of a second table."""
        inputs = [group.layer_inputs for group in self.groups if group.layer_inputs is not None]
        if not inputs:
            return self
        return self._replace(layer_input=lax.dynamic_index_in_dim(pack(inputs), layer, axis=-2, keepdims=False))

    @property
    def valid(self) -> jax.Array:
        """Which of the packed tokens are no padding, bool [N]."""
        return pack(group.positions for group in self.groups) >= 0

    def adapter_deltas(self, adapters: LayerAdapters | None) -> AdapterDeltas:
        """Bind a layer's adapters to the tokens of this pass."""
        if adapters is None or self.adapter_one_hot is None:
            return NO_DELTAS
        one_hot = self.adapter_one_hot
        return AdapterDeltas(*(x and functools.partial(x, adapter_one_hot=one_hot) for x in adapters))


def pack(parts: Iterable[jax.Array]) -> jax.Array:
    """[B, T, ...] of each group -> [N, ...]. A single group keeps its shape: XLA:GPU makes fewer kernels of it."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    return jnp.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])


def unpack(x: jax.Array, groups: tuple[TokenRows, ...]) -> list[jax.Array]:
    """Undo `pack`: [N, ...] -> [B, T, ...] of each group."""
    if len(groups) == 1:
        return [x]
    ends = np.cumsum([group.ids.size for group in groups])
    parts = jnp.split(x, ends[:-1])
    return [part.reshape(*group.ids.shape, *x.shape[1:]) for part, group in zip(parts, groups, strict=True)]


def _adapter_one_hot(group: TokenRows, slots: int) -> jax.Array:
    """Encode the adapter of each token: [B, T, S]."""
    assert group.adapter is not None, "a pass with adapters needs the adapter of each row"
    return jnp.broadcast_to(jax.nn.one_hot(group.adapter - 1, slots)[:, None], (*group.ids.shape, slots))
