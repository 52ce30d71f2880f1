"""The formula of every kind of block: how a layer joins attention and its MLP to the residual stream.

In a parallel block both begin at the stream x (`parallel`). In all others attention comes first and the MLP follows.
Both join the stream in the same way, as a `Branch` of the layer; f below is either of them.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax

from jaxinfer.models.config import BlockKind
from jaxinfer.models.layers.linear import Linear, PartialSum
from jaxinfer.models.layers.low_rank import AdapterDelta
from jaxinfer.models.layers.norm import Norm
from jaxinfer.sharding.collectives import mesh_axes


class Output(Protocol):
    """The output of f, [N, D], alone or added to the stream."""

    def value(self) -> jax.Array: ...

    def plus(self, x: jax.Array) -> jax.Array: ...


class Product(NamedTuple):
    """The output of attention or an MLP, by its last matrix; a kernel may add the stream to it.

    Attributes:
      linear: the matrix.
      hidden: what it multiplies, [N, K].
      delta: an adapter's part; None: there is none.
    """

    linear: Linear
    hidden: jax.Array
    delta: AdapterDelta | None

    def value(self) -> jax.Array:
        """f's output."""
        return self.linear(self.hidden, adapter_delta=self.delta)

    def plus(self, x: jax.Array) -> jax.Array:
        """x + f's output."""
        return self.linear.linear_residual(self.hidden, x, adapter_delta=self.delta)

    def partial_plus(self, x: jax.Array | PartialSum) -> PartialSum:
        """x + f's output, of which each device has a part that is not added up yet."""
        return self.linear.partial_sum(self.hidden, x, adapter_delta=self.delta)


class PlainOutput(NamedTuple):
    """An output that is there, such as that of a mixture of experts."""

    y: jax.Array

    def value(self) -> jax.Array:
        """The output."""
        return self.y

    def plus(self, x: jax.Array) -> jax.Array:
        """x + the output."""
        return x + self.y


class Branch(NamedTuple):
    """The way of attention or the MLP from the stream and back to it.

    Attributes:
      norm: the norm of what f takes; None: f takes the stream itself.
      join: the stream [N, D] with f's output.
    """

    norm: Norm | None
    join: Callable[[jax.Array, Output], jax.Array]


def make_branch(kind: BlockKind, norm: Norm, post_norm: Norm | None, scale: float) -> Branch:
    """Make attention's or the MLP's branch of a block: the formula of every kind of block but the parallel ones.

    Args:
      kind: of the block.
      norm: the norm that every block has.
      post_norm: the norm after f, which only a sandwich block has.
      scale: of f's output, for a sequential block.
    """
    match kind:
        case BlockKind.SANDWICH:  # x + post_norm(f(norm(x)))
            assert post_norm is not None
            return Branch(norm, lambda x, f: x + post_norm(f.value()))
        case BlockKind.REORDERED:  # x + norm(f(x))
            return Branch(None, lambda x, f: x + norm(f.value()))
        case BlockKind.POST_NORM:  # norm(x + f(x))
            return Branch(None, lambda x, f: norm(f.plus(x)))
        case _:  # x + scale * f(norm(x)); a parallel block has its norms where a sequential one has them
            return Branch(norm, lambda x, f: f.plus(x) if scale == 1.0 else x + scale * f.value())


def parallel(x: jax.Array, attention: Product, mlp: Callable[[], Product]) -> jax.Array:
    """x + attention(norm1(x)) + mlp(norm2(x)).

    Where devices have parts of both, one sum over the devices adds them up.
    """
    one_sum = mesh_axes("heads") and mesh_axes("heads") == mesh_axes("mlp")
    with jax.named_scope("attention"):
        y = attention.partial_plus(x) if one_sum else attention.plus(x)
    with jax.named_scope("mlp"):
        return mlp().partial_plus(y).finish() if isinstance(y, PartialSum) else mlp().plus(y)
