"""`enter`, `layer`, `leave`: one pass in parts, so that each layer's weights are needed only while it runs.

`layer` runs one layer, or several that are on the devices all the time. All ranges of the same length and kinds share
one executable for each bucket, whatever their number (DeepSpeed Inference, VI-A). A decode step is a pass without
chunks; with speculative tokens it begins with `propose`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp

from jaxinfer.checkpoints import Leaf
from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.compiled.spec import shapes_of
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DecoderStatic, DeviceLayout, integers
from jaxinfer.generation.execution.programs import prefill
from jaxinfer.generation.execution.programs.embed import EncoderSizes, EncoderStatic
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.prefill import Chunks, PrefillOutput
from jaxinfer.generation.execution.programs.verification import (
    DecodeOutput,
    DecodeRows,
    PassState,
    Speculation,
    finish_step,
    speculate,
    verify,
)
from jaxinfer.generation.execution.state import Rows, Slots, options_of, progress_of
from jaxinfer.generation.sampling.logprobs import no_logprobs
from jaxinfer.models import Cache, DecoderConfig, LayerAdapters, TokenRows
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.layers.forward_context import ForwardContext
from jaxinfer.models.leaves import leaves_of_part
from jaxinfer.sharding.collectives import gather_fetched, use_rules
from jaxinfer.streaming.config import LayerRange
from jaxinfer.streaming.model import StreamedModel

if TYPE_CHECKING:
    from jaxinfer.models import Decoder, Encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Propose(Sizes):
    """`batch` rows, with `speculative` tokens each."""

    program = "propose"
    batch: int
    speculative: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Enter(Pass):
    """The sizes of the pass."""

    program = "enter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Pass):
    """The sizes of the pass, and the layers.

    Attributes:
      kind: the first layer of the model that begins as many layers of the same kinds.
      layers: the number of layers.
    """

    program = "layer"
    kind: int
    layers: int

    @classmethod
    def of_kind(cls, sizes: Pass, kind: int, layers: int) -> Self:
        """The sizes of `layer` for these layers, in a pass of these sizes."""
        return cls(
            chunks=sizes.chunks,
            batch=sizes.batch,
            speculative=sizes.speculative,
            pages=sizes.pages,
            kind=kind,
            layers=layers,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leave(Pass):
    """The sizes of the pass."""

    program = "leave"


def with_parts(
    static: DecoderStatic | EncoderStatic, layers: Iterable[int] | None, body: Callable[..., Any]
) -> Callable[..., Any]:
    """Turn a function of (model, *rest) into one of (leaves, *rest): those of the layers in turn; None: the others."""
    leaves: dict[str, Leaf] = {}
    for part in [None] if layers is None else layers:
        leaves |= leaves_of_part(static.config, static.weights, part)

    def function(arrays: list[jax.Array], *rest: Any) -> Any:
        from jaxinfer.models.abstract import merge_parts  # imports Flax, which only tracing needs

        with use_rules(static.rules):
            parts = dict(zip(leaves, arrays, strict=True))
            if layers is not None:
                parts = {name: gather_fetched(x, leaves[name].axes, leaves[name].shape) for name, x in parts.items()}
            return body(merge_parts(static.config, static.weights, parts), *rest)

    return function


def run_layers(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    caches: list[Cache],
    x: jax.Array,
    groups: tuple[TokenRows, ...],
    number: jax.Array | None = None,
    *,
    layers: range,
    speculates: bool = False,
) -> tuple[jax.Array, list[Cache] | None]:
    """Run layers over a pass's activations, [N, D] -> [N, D]; returns their caches with its keys and values too.

    Args:
      number: as in `Decoder.run_layers`.
      speculates: as in `ForwardContext`.
    """
    positions = [model.cfg.layer(layer).positions for layer in layers]
    any_adapters = None if adapters is None else adapters[0]
    forward_context = ForwardContext.from_groups(groups, positions, any_adapters, speculates=speculates)
    return model.run_layers(x, forward_context, caches, adapters, first=layers[0], last=layers[-1], number=number)


def propose(slots: Slots, slot: jax.Array, limit: jax.Array, *, width: int) -> Speculation:
    """Propose speculative tokens for the rows in some slots, at most `limit` [B] and `width` each."""
    return speculate(slots.history, slot, progress_of(slots, slot), options_of(slots, slot), limit, width)


def enter(
    model: "Decoder", slots: Slots, chunks: Chunks | None, rows: Rows, guess: Speculation | None, *, chunk_size: int
) -> tuple[jax.Array, tuple[TokenRows, ...]]:
    """The embeddings of a pass, [N, D], and its tokens; arguments as in `prefill.groups_of`."""
    groups = prefill.groups_of(slots, chunks, rows, guess, chunk_size=chunk_size)
    x, forward_context = model.enter(groups)
    return x, forward_context.groups


def leave(
    model: "Decoder",
    slots: Slots,
    x: jax.Array,
    groups: tuple[TokenRows, ...],
    chunks: Chunks | None,
    rows: Rows,
    bitmask: jax.Array,
    guess: Speculation | None,
    *,
    processors: Any,
) -> tuple[Slots, PrefillOutput | DecodeOutput]:
    """Choose the next tokens, from the output of the last layer."""
    hidden = model.leave(x, ForwardContext(groups, {}))
    if chunks is not None:
        return prefill.add_tokens(model, slots, hidden, chunks, rows, bitmask, processors=processors)
    batch = rows.slot.size
    guess = Speculation.none(batch) if guess is None else guess
    width = 1 + guess.tokens.shape[1]
    step = DecodeRows.from_slots(slots, rows, bitmask)
    before = PassState(slots.history, progress_of(slots, rows.slot), no_logprobs((batch, width)))
    after, accepted = verify(model, step, before, hidden[0], guess, processors)
    passes = jnp.array([0, 1] if width > 1 else [1, 0], jnp.int32)
    return finish_step(slots, step, after, guess.num_tokens, accepted, passes, width=width)


def _layers(sizes: "Layer | EncoderLayer") -> range:
    """The layers whose names a program of these sizes uses."""
    return range(sizes.kind, sizes.kind + sizes.layers)


def build_layer(static: DecoderStatic, sizes: Layer) -> Callable[..., Any]:
    """Build the function of these sizes."""
    body = functools.partial(run_layers, layers=_layers(sizes), speculates=sizes.speculative > 0)
    return with_parts(static, _layers(sizes), body)


def build_propose(static: DecoderStatic, sizes: Propose) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return functools.partial(propose, width=sizes.speculative)


def build_enter(static: DecoderStatic, sizes: Enter) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return with_parts(static, None, functools.partial(enter, chunk_size=static.engine.chunk_size))


def build_leave(static: DecoderStatic, sizes: Leave) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return with_parts(static, None, functools.partial(leave, processors=static.processors))


def passes(buckets: Buckets, speculative: int) -> Iterable[Pass]:
    """Yield the sizes of all passes: with chunks, and without, in which rows may have speculative tokens."""
    for pages in buckets.page_tables:
        for chunks in buckets.chunks:
            for batch in buckets.prefill_rows:
                yield Pass(chunks=chunks, batch=batch, speculative=0, pages=pages)
        for batch in buckets.decode_rows:
            for count in sorted({0, speculative}):
                yield Pass(chunks=0, batch=batch, speculative=count, pages=pages)


def _kinds(ranges: Iterable[LayerRange]) -> list[tuple[int, int]]:
    """The kind and the number of layers of every `layer` program."""
    return sorted({(layers.kind, layers.count) for layers in ranges})


def runs_experts(config: TransformerConfig, layers: LayerRange) -> bool:
    """Return whether the layers are one with experts, which runs by the programs of `experts.py`."""
    return isinstance(config, DecoderConfig) and layers.kind in config.moe_layers


def pass_options(layout: DeviceLayout, sizes: Pass) -> dict[str, Any]:
    """Return XLA's options for a program of a pass."""
    return layout.compiler_options(tokens=sizes.tokens(layout.engine.chunk_size))


def _layer_inputs(layout: DeviceLayout, rows: int, tokens: int) -> Any:
    """The shape of what layers take of a second table, for rows of tokens."""
    width = layout.config.layer_inputs
    return width and jax.ShapeDtypeStruct((rows, tokens, layout.config.layers, width), layout.weights.dtype)


def activations(layout: DeviceLayout, sizes: Pass) -> tuple[Any, tuple[TokenRows, ...]]:
    """The shapes of a pass's activations between layers, [N, D], and of its tokens."""
    groups = tuple(
        TokenRows(
            integers(rows, tokens),
            integers(rows, tokens),
            integers(rows, sizes.pages),
            integers(rows),
            integers(rows),
            _layer_inputs(layout, rows, tokens),
        )
        for rows, tokens in (
            (sizes.chunks, layout.engine.chunk_size),
            (sizes.batch, 1 + sizes.speculative),
        )
        if rows
    )
    shape = groups[0].ids.shape if len(groups) == 1 else (sum(group.ids.size for group in groups),)
    x = jax.ShapeDtypeStruct((*shape, layout.config.embed), layout.weights.dtype)
    return layout.inputs(x, groups)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The shapes of a decoder's programs' arguments in a layout."""

    layout: DeviceLayout

    def propose(self, sizes: Propose) -> tuple[Any, ...]:
        vector = integers(sizes.batch)
        return self.layout.state.slots, *self.layout.inputs(vector, vector)

    def enter(self, sizes: Enter) -> tuple[Any, ...]:
        inputs = self.layout.inputs(*self._parts(sizes))
        return self.layout.leaves, self.layout.state.slots, *inputs, *self._guess(sizes)

    def layer(self, sizes: Layer) -> tuple[Any, ...]:
        layout, layers = self.layout, _layers(sizes)
        leaves = [leaf for layer in layers for leaf in layout.layer_leaves(layer)]
        adapters = None if layout.adapters is None else [layout.adapters[layer] for layer in layers]
        number = layout.place(integers()) if layout.config.layer_inputs else None
        return leaves, adapters, layout.caches_of(layers), *activations(layout, sizes), number

    def leave(self, sizes: Leave) -> tuple[Any, ...]:
        layout, bitmask = self.layout, self.layout.bitmask(sizes.chunks + sizes.batch)
        inputs = layout.inputs(*self._parts(sizes), bitmask)
        return layout.leaves, layout.state.slots, *activations(layout, sizes), *inputs, *self._guess(sizes)

    def _parts(self, sizes: Pass) -> tuple[Chunks | None, Rows]:
        chunks, rows = prefill.parts(self.layout, chunks=sizes.chunks, batch=sizes.batch, pages=sizes.pages)
        return chunks if sizes.chunks else None, rows

    def _guess(self, sizes: Pass) -> tuple[Speculation | None]:
        batch, width = sizes.batch, sizes.speculative
        return self.layout.inputs(Speculation(integers(batch, width), integers(batch)) if width else None)  # type: ignore


def decoder_specs(layout: DeviceLayout, ranges: Collection[LayerRange]) -> list[ProgramSpec[Any, Buckets]]:
    """The specs of a pass over layers in these ranges, without those for layers with experts."""
    config, static, on_mesh = layout.config, layout.static, layout.mesh is not None
    arguments, options = _Arguments(layout), functools.partial(pass_options, layout)
    most = layout.engine.num_speculative_tokens
    kinds = _kinds(layers for layers in ranges if not runs_experts(config, layers))
    return [
        ProgramSpec(
            sizes=Propose,
            build=build_propose,
            static=static,
            arguments=arguments.propose,
            reachable=lambda buckets: (Propose(batch=batch, speculative=most) for batch in buckets.decode_rows if most),
        ),
        ProgramSpec(
            sizes=Enter,
            build=build_enter,
            static=static,
            arguments=arguments.enter,
            reachable=lambda buckets: map(Enter.for_pass, passes(buckets, most)),
            compiler_options=options,
        ),
        ProgramSpec(
            sizes=Layer,
            build=build_layer,
            static=static,
            arguments=arguments.layer,
            reachable=lambda buckets: (
                Layer.of_kind(sizes, *kind) for sizes in passes(buckets, most) for kind in kinds
            ),
            donate=(2, 3),
            out_shardings=lambda sizes: (
                (None, layout.shardings_of(layout.caches_of(_layers(sizes)))) if on_mesh else None
            ),
            compiler_options=options,
        ),
        ProgramSpec(
            sizes=Leave,
            build=build_leave,
            static=static,
            arguments=arguments.leave,
            reachable=lambda buckets: map(Leave.for_pass, passes(buckets, most)),
            donate=(1,),
            out_shardings=lambda sizes: (layout.state_shardings.slots, None) if on_mesh else None,
            compiler_options=options,
        ),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderEnter(EncoderSizes):
    """The sizes of the batch."""

    program = "enter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderLayer(EncoderSizes):
    """The sizes of the batch, and the layers, as in `Layer`."""

    program = "layer"
    kind: int
    layers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderLeave(EncoderSizes):
    """The sizes of the batch."""

    program = "leave"


def enter_encoder(model: "Encoder", tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Compute the embeddings of a batch, [B, T, D]; arguments as in `embed`."""
    return model.enter(tokens, positions)[0]


def run_encoder_layers(model: "Encoder", x: jax.Array, groups: tuple[TokenRows, ...], *, layers: range) -> jax.Array:
    """Run layers over a batch's activations, [B, T, D] -> [B, T, D]."""
    forward_context = ForwardContext.from_groups(groups, ())
    return model.run_layers(x, forward_context, first=layers[0], last=layers[-1])


def leave_encoder(model: "Encoder", x: jax.Array, positions: jax.Array) -> jax.Array:
    """Compute the vectors of a batch, float32 [B, D], from the output of the last layer."""
    return model.pool(x, positions >= 0)


def build_enter_encoder(static: EncoderStatic, sizes: EncoderEnter) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return with_parts(static, None, enter_encoder)


def build_layer_encoder(static: EncoderStatic, sizes: EncoderLayer) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return with_parts(static, _layers(sizes), functools.partial(run_encoder_layers, layers=_layers(sizes)))


def build_leave_encoder(static: EncoderStatic, sizes: EncoderLeave) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return with_parts(static, None, leave_encoder)


def encoder_specs(
    model: StreamedModel, ranges: Collection[LayerRange]
) -> list[ProgramSpec[Any, Iterable[tuple[int, int]]]]:
    """The specs of a batch's programs, for layers in these ranges."""
    config, dtype, leaves = model.transformer, model.weights.dtype, shapes_of(model.leaves.values())
    static = EncoderStatic.from_model(model)
    kinds = _kinds(ranges)
    of_layers = {layer: model.layer_shapes(layer) for kind, count in kinds for layer in range(kind, kind + count)}

    def activations(sizes: EncoderSizes) -> tuple[Any, Any, tuple[TokenRows, ...]]:
        shape = (sizes.batch, sizes.tokens)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        x = jax.ShapeDtypeStruct((*shape, config.embed), dtype)
        return tokens, x, (TokenRows(tokens, tokens),)  # type: ignore[arg-type]

    def of_enter(sizes: EncoderEnter) -> tuple[Any, ...]:
        tokens, _, _ = activations(sizes)
        return leaves, tokens, tokens

    def of_layer(sizes: EncoderLayer) -> tuple[Any, ...]:
        _, x, groups = activations(sizes)
        return [leaf for layer in _layers(sizes) for leaf in of_layers[layer]], x, groups

    def of_leave(sizes: EncoderLeave) -> tuple[Any, ...]:
        tokens, x, _ = activations(sizes)
        return leaves, x, tokens

    return [
        ProgramSpec(
            sizes=EncoderEnter,
            build=build_enter_encoder,
            static=static,
            arguments=of_enter,
            reachable=lambda shapes: (EncoderEnter(batch=rows, tokens=length) for rows, length in shapes),
        ),
        ProgramSpec(
            sizes=EncoderLayer,
            build=build_layer_encoder,
            static=static,
            arguments=of_layer,
            reachable=lambda shapes: (
                EncoderLayer(batch=rows, tokens=length, kind=kind, layers=count)
                for rows, length in shapes
                for kind, count in kinds
            ),
        ),
        ProgramSpec(
            sizes=EncoderLeave,
            build=build_leave_encoder,
            static=static,
            arguments=of_leave,
            reachable=lambda shapes: (EncoderLeave(batch=rows, tokens=length) for rows, length in shapes),
        ),
    ]
