"""`route`, `experts`, `join`: a layer whose experts come and go, in parts.

`route` runs the layer as far as the choice of experts, which the host reads. `experts` runs a few of those that were
chosen, in any order: each writes the rows of its tokens, which no other expert has, so that the sum that `join` makes
of them does not depend on the order. The layer's own weights, without experts, are arguments of `route` and `join`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.checkpoints import Leaf
from jaxinfer.checkpoints.manifest import part_of
from jaxinfer.compiled import ProgramSpec
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DecoderStatic, DeviceLayout, integers
from jaxinfer.generation.execution.programs.chain import activations, pass_options, passes, runs_experts, with_parts
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.models import Cache, DecoderConfig, LayerAdapters, TokenRows, WeightFormat
from jaxinfer.models.config import MlpConfig, MoeConfig
from jaxinfer.models.layers.forward_context import ForwardContext
from jaxinfer.models.leaves import leaves_of_part
from jaxinfer.pallas_kernels import Weights, activate_outputs, small_batch_linear
from jaxinfer.pallas_kernels.moe import Routing, unpermute
from jaxinfer.streaming.config import LayerRange
from jaxinfer.streaming.experts import GROUP

if TYPE_CHECKING:
    from jaxinfer.models import Decoder
    from jaxinfer.models.layers.layer import TransformerLayer
    from jaxinfer.models.layers.moe import Moe

MAX_TILE = 64
"""Rows of an expert that are multiplied at once: more would only be more padding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfLayer(Pass):
    """The sizes of the pass, and the layer.

    Attributes:
      kind: the first layer of the model of the same kind.
    """

    kind: int

    @classmethod
    def of_kind(cls, sizes: Pass, kind: int) -> Self:
        """The sizes of a program for such a layer, in a pass of these sizes."""
        return cls(
            chunks=sizes.chunks, batch=sizes.batch, speculative=sizes.speculative, pages=cls._pages(sizes), kind=kind
        )

    @classmethod
    def _pages(cls, sizes: Pass) -> int:
        """Return 0: the program attends to nothing."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route(_OfLayer):
    """The sizes of the pass, and the layer."""

    program = "route"

    @classmethod
    def _pages(cls, sizes: Pass) -> int:
        return sizes.pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunExperts(_OfLayer):
    """The sizes of the pass, and the layer."""

    program = "experts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Join(_OfLayer):
    """The sizes of the pass, and the layer."""

    program = "join"


def tile_rows(config: DecoderConfig, sizes: _OfLayer, chunk_size: int) -> int:
    """Return how many rows of an expert are multiplied at once: about twice its share, a power of two."""
    router, tokens = _moe(config, sizes.kind).router, sizes.tokens(chunk_size)
    share = tokens * router.experts_per_token // router.experts
    return min(1 << (max(8, 2 * share) - 1).bit_length(), 1 << (tokens - 1).bit_length(), MAX_TILE)


@functools.cache
def mlp_kind(config: DecoderConfig, layer: int) -> int:
    """The first layer with the same experts, and weights of the same shapes.

    Programs that run nothing but experts are one for all such layers.
    """

    def kind(layer: int) -> tuple[MlpConfig, list[tuple[str, Leaf]]]:
        leaves = leaves_of_part(config, WeightFormat(), layer)
        return config.layer(layer).mlp, [(name.removeprefix(f"layers.{layer}."), leaf) for name, leaf in leaves.items()]

    experts = kind(layer)
    return next(other for other in config.moe_layers if kind(other) == experts)


def _moe(config: DecoderConfig, layer: int) -> MoeConfig:
    moe = config.layer(layer).mlp.moe
    assert moe is not None
    return moe


def route(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    caches: list[Cache],
    x: jax.Array,
    groups: tuple[TokenRows, ...],
    *,
    layer: int,
    tile: int,
    speculates: bool,
) -> tuple[jax.Array, list[Cache | None], jax.Array, Routing, jax.Array]:
    """Run a layer as far as the choice of experts.

    Args:
      x: [N, D]. caches, adapters: of the layer alone.
      tile: how many rows `experts` may write beyond the last.
      speculates: as in `ForwardContext`.
    Returns: the residual stream, [N, D]; the layer's cache; what the experts take, [N, D]; their tables; and zeros
      [R + tile, D], to write their rows to.
    """
    any_adapters, positions = None if adapters is None else adapters[0], [model.cfg.layer(layer).positions]
    forward_context = ForwardContext.from_groups(groups, positions, any_adapters, speculates=speculates)
    block = model.layers[layer]
    with jax.named_scope(f"layers.{layer}"):
        deltas = forward_context.adapter_deltas(any_adapters)
        heads, cache = block.mixer.heads(x, block.norm_before_attention, forward_context, caches[0], deltas=deltas)
        x = block.add_attention(x, heads, deltas)
        h = block.before_mlp(x).reshape(-1, x.shape[-1])
        mixture = _mixture(block)
        routing, h = mixture.router(h, forward_context.valid.reshape(-1)), mixture.before_experts(h)
    return x, [cache], h, routing, jnp.zeros((routing.tokens.size + tile, h.shape[1]), h.dtype)


def _mixture(block: "TransformerLayer") -> "Moe":
    from jaxinfer.models.layers.moe import Moe  # imports Flax, which only tracing needs

    assert isinstance(block.mlp, Moe)
    return block.mlp


def run_experts(
    leaves: list[list[jax.Array]],
    h: jax.Array,
    tokens: jax.Array,
    y: jax.Array,
    first: jax.Array,
    size: jax.Array,
    *,
    names: tuple[str, ...],
    mlp: MlpConfig,
    tile: int,
) -> jax.Array:
    """Run experts on their rows.

    Args:
      leaves: of each expert, by `names`.
      h: [N, D], what they take.
      tokens: int32 [R], the token of each row.
      y: [R + tile, D], the rows of all experts.
      first, size: int32 [`GROUP`], the rows of each expert.
    Returns: y with these experts' rows.
    """
    tokens = jnp.pad(tokens, (0, tile), constant_values=len(h))

    def run(i: jax.Array, y: jax.Array, expert: dict[str, jax.Array], first: jax.Array, size: jax.Array) -> jax.Array:
        start = first + i * tile
        x = h.at[lax.dynamic_slice_in_dim(tokens, start, tile)].get(mode="fill", fill_value=0)
        hidden = activate_outputs(_linear(x, expert, "gate_up"), mlp.activation, gated=mlp.gated)
        here = (i * tile + jnp.arange(tile) < size)[:, None]  # the rows after them are other experts'
        rows = jnp.where(here, _linear(hidden, expert, "down"), lax.dynamic_slice_in_dim(y, start, tile))
        return lax.dynamic_update_slice_in_dim(y, rows, start, 0)

    for arrays, row, count in zip(leaves, first, size, strict=True):
        expert = dict(zip(names, arrays, strict=True))
        y = lax.fori_loop(0, -(-count // tile), functools.partial(run, expert=expert, first=row, size=count), y)
    return y


def _linear(x: jax.Array, expert: dict[str, jax.Array], name: str) -> jax.Array:
    """x W^T + b for one of an expert's matrices, [R, K] -> [R, N]."""
    y = small_batch_linear(x, Weights(expert[f"{name}.weight"], expert.get(f"{name}.scale")))
    bias = expert.get(f"{name}.bias")
    return y if bias is None else y + bias.astype(y.dtype)


def join(model: "Decoder", x: jax.Array, routing: Routing, y: jax.Array, *, layer: int) -> tuple[jax.Array, jax.Array]:
    """Join what the experts gave to the residual stream.

    Args:
      x, routing: what `route` gave.
      y: the rows of all experts.
    Returns: the stream, [N, D], and a number that is there when it is.
    """
    from jaxinfer.models.layers.linear import PartialSum  # imports Flax, which only tracing needs

    block = model.layers[layer]
    with jax.named_scope(f"layers.{layer}"):
        experts = unpermute(y[: routing.tokens.size], routing)
        h = block.before_mlp(x).reshape(-1, x.shape[-1])
        x = block.finish(block.join_mlp(x, _mixture(block).combine(h, PartialSum(experts, ())).reshape(x.shape)))
    return x, x.reshape(-1)[0]


def build_route(static: DecoderStatic, sizes: Route) -> Callable[..., Any]:
    """Build the function of these sizes."""
    tile = tile_rows(static.config, sizes, static.engine.chunk_size)
    body = functools.partial(route, layer=sizes.kind, tile=tile, speculates=sizes.speculative > 0)
    return with_parts(static, [sizes.kind], body)


def build_experts(static: DecoderStatic, sizes: RunExperts) -> Callable[..., Any]:
    """Build the function of these sizes."""
    prefix = f"layers.{sizes.kind}.mlp.experts."
    names = leaves_of_part(static.config, static.weights, sizes.kind, 0)
    return functools.partial(
        run_experts,
        names=tuple(part_of(name)[0].removeprefix(prefix) for name in names),
        mlp=static.config.layer(sizes.kind).mlp,
        tile=tile_rows(static.config, sizes, static.engine.chunk_size),
    )


def build_join(static: DecoderStatic, sizes: Join) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return with_parts(static, [sizes.kind], functools.partial(join, layer=sizes.kind))


@dataclasses.dataclass(frozen=True)
class _ExpertArguments:
    """The shapes of the programs' arguments in a layout."""

    layout: DeviceLayout

    def route(self, sizes: Route) -> tuple[Any, ...]:
        layout = self.layout
        adapters = None if layout.adapters is None else [layout.adapters[sizes.kind]]
        caches = layout.caches_of(range(sizes.kind, sizes.kind + 1))
        return layout.layer_leaves(sizes.kind), adapters, caches, *activations(layout, sizes)

    def experts(self, sizes: RunExperts) -> tuple[Any, ...]:
        leaves, each = [self.layout.layer_leaves(sizes.kind, expert=0)] * GROUP, integers(GROUP)
        h, tokens, y = self._inputs(sizes), self._tables(sizes).tokens, self._outputs(sizes)
        return leaves, *self.layout.inputs(h, tokens, y, each, each)

    def join(self, sizes: Join) -> tuple[Any, ...]:
        x, _ = activations(self.layout, sizes)
        inputs = self.layout.inputs(self._tables(sizes), self._outputs(sizes))
        return self.layout.layer_leaves(sizes.kind), x, *inputs

    def _inputs(self, sizes: _OfLayer) -> Any:
        """The tokens that the experts take, [N, D]."""
        return self._vectors(sizes.tokens(self.layout.engine.chunk_size))

    def _outputs(self, sizes: _OfLayer) -> Any:
        """The rows that the experts write, [R + tile, D]."""
        tile = tile_rows(self.layout.config, sizes, self.layout.engine.chunk_size)
        return self._vectors(self._tables(sizes).tokens.size + tile)

    def _vectors(self, rows: int) -> Any:
        return jax.ShapeDtypeStruct((rows, self.layout.config.embed), self.layout.weights.dtype)

    def _tables(self, sizes: _OfLayer) -> Routing:
        router, tokens = _moe(self.layout.config, sizes.kind).router, sizes.tokens(self.layout.engine.chunk_size)
        capacity, choices = router.capacity(tokens), integers(tokens, router.experts_per_token)
        rows = choices.size if capacity is None else router.experts * capacity
        weights: Any = jax.ShapeDtypeStruct(choices.shape, jnp.float32)
        each = integers(router.experts)
        return Routing(choices, weights, choices, integers(rows), each, each)


def expert_specs(layout: DeviceLayout, ranges: Collection[LayerRange]) -> list[ProgramSpec[Any, Buckets]]:
    """The specs of the programs for layers with experts; none if there is no such layer in these ranges."""
    config, static, on_mesh = layout.config, layout.static, layout.mesh is not None
    kinds = sorted({layers.kind for layers in ranges if runs_experts(config, layers)})
    if not kinds:
        return []
    mlp_kinds = sorted({mlp_kind(config, kind) for kind in kinds})
    arguments, options = _ExpertArguments(layout), functools.partial(pass_options, layout)

    def reachable(program: type[_OfLayer], kinds: list[int]) -> Callable[[Buckets], Iterable[Any]]:
        most = layout.engine.num_speculative_tokens
        return lambda buckets: dict.fromkeys(
            program.of_kind(sizes, kind) for sizes in passes(buckets, most) for kind in kinds
        )

    return [
        ProgramSpec(
            sizes=Route,
            build=build_route,
            static=static,
            arguments=arguments.route,
            reachable=reachable(Route, kinds),
            donate=(2, 3),
            out_shardings=lambda sizes: (
                (None, layout.shardings_of(layout.caches_of(range(sizes.kind, sizes.kind + 1))), None, None, None)
                if on_mesh
                else None
            ),
            compiler_options=options,
        ),
        ProgramSpec(
            sizes=RunExperts,
            build=build_experts,
            static=static,
            arguments=arguments.experts,
            reachable=reachable(RunExperts, mlp_kinds),
            donate=(3,),
            compiler_options=options,
        ),
        ProgramSpec(
            sizes=Join,
            build=build_join,
            static=static,
            arguments=arguments.join,
            reachable=reachable(Join, mlp_kinds),
            donate=(1,),
            compiler_options=options,
        ),
    ]
