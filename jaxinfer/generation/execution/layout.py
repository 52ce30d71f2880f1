"""The shapes of everything on the device and where each array lives; holds no array but the weights."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.checkpoints import Leaf
from jaxinfer.compiled import compiler_options
from jaxinfer.compiled.spec import shapes_of
from jaxinfer.generation.engine.batch import PageBlock, StateBlock
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.state import DeviceState, Rows, Slots, pages_by_shape
from jaxinfer.generation.lora.peft import Adapter, adapter_shapes
from jaxinfer.generation.sampling.arrays import idle_options, sampling_arrays
from jaxinfer.generation.sampling.bitmasks import bitmask_words
from jaxinfer.generation.sampling.sampler import LogitsProcessors
from jaxinfer.models import Cache, DecoderConfig, KVPages, LayerAdapters, LowRankStack, RecurrentState, WeightFormat
from jaxinfer.models.config import Mixer
from jaxinfer.models.devices import fetch_sharding_on, placed_leaf, sharding_on
from jaxinfer.models.files.loading import LoadedModel, OpenedModel
from jaxinfer.models.fitting import Fitting
from jaxinfer.models.leaves import canonical_leaves, leaves_of_part, recurrent_shapes, state_axes
from jaxinfer.models.stages import Stages, stages_on
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.collectives import use_rules

ADAPTER_AXES = {
    **dict.fromkeys(("qkv", "gate", "steps"), ("heads", None)),
    "out": (None, "heads"),
    "gate_up": ("mlp", None),
    "down": (None, "mlp"),
}
"""The fields of `LayerAdapters` -> the logical axes of outputs and inputs of their linears."""


def integers(*shape: int) -> Any:
    """The shape of an int32 array; typed as an array, since it stands for one in named tuples."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def flags(*shape: int) -> Any:
    """The shape of a bool array; typed as an array, since it stands for one in named tuples."""
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


@dataclasses.dataclass(frozen=True)
class DecoderStatic:
    """Everything that a decoder's programs depend on beside the shapes of their arguments.

    Attributes:
      config: the model's config.
      weights: the format of its leaves.
      engine: the engine's sizes.
      rules: which dimension is split over which mesh axis.
      processors: logits processors, compiled into the programs that choose tokens; these are never kept on disk.
      stages: the layers of each stage of a pipeline, of which `config` has those of one; None: all layers are here.
    """

    config: DecoderConfig
    weights: WeightFormat
    engine: EngineConfig
    rules: ShardingRules
    processors: LogitsProcessors = ()
    stages: Stages | None = None

    def with_model(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a function of (model, *rest) into one of (weights, *rest)."""

        def function(leaves: list[jax.Array], *rest: Any) -> Any:
            from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

            if self.stages is not None:
                leaves = [leaves[place] for place in self.stages.order(self.weights)]
            with use_rules(self.rules):
                return body(merge_model(self.config, self.weights, leaves), *rest)

        return function


class DeviceLayout:
    """The device side of one decoder, in shapes.

    On a mesh with lanes each has as many slots and pages as it would have alone. Arrays of requests and pages have
    those of all lanes one after the other; programs see one lane's part. So have weights, pages and adapters those of
    all stages of a pipeline, of which each has the layers at the same positions; slots are equal on all of them.

    Args:
      config: the model's config, fitted to the mesh.
      weights: the format of its leaves.
      engine: the engine's sizes.
      num_pages: the size of the KV cache, of each lane.
      slice_pages: pages of one layer that are on the devices at a time; 0: all pages of all layers are.
      platform: the platform it runs on.
      processors: logits processors, compiled into the programs that choose tokens.
      mesh: the devices; None: one.
      rules: which dimension is split over which mesh axis.
      leaves: the weights, or their shapes with where they live; None: their shapes alone.
      fitting: how the config was fitted, for adapters; None: it was not.
      family: the model's family, for adapters.

    Attributes:
      config: of the model, or of the layers of each stage.
      stages: the layers of each stage; None: each device has parts of all layers.
      static: everything that programs depend on beside shapes.
      leaves: the weights that are on the device all the time, or their shapes.
      caches: the shapes of the caches, as programs take them, by `cache_places`.
      cache_places: as `DecoderConfig.cache_places`.
      state: the shapes of `DeviceState`, which has the caches unless they are in the host's memory.
      adapters: the shapes of the adapters on the device, or None.
      mesh: the devices, or None for one.
      lanes: how many lanes the mesh has. num_stages: how many stages; 1 without a pipeline.
      num_snapshots: snapshots of recurrent states of each lane, which follow those of the slots; 0 without states.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightFormat,
        engine: EngineConfig,
        *,
        num_pages: int,
        slice_pages: int = 0,
        platform: str,
        processors: LogitsProcessors = (),
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
        leaves: Iterable[jax.Array | jax.ShapeDtypeStruct] | None = None,
        fitting: Fitting | None = None,
        family: str = "",
    ):
        self.weights, self.engine, self.num_pages, self.slice_pages = weights, engine, num_pages, slice_pages
        self.mesh, self.platform, self._rules = mesh, platform, rules or ShardingRules()
        self.stages = stages_on(config, mesh, self._rules)
        self.config = config if self.stages is None else self.stages.config
        self.lanes, self.num_stages = self._rules.lanes(mesh), self._rules.num_stages(mesh)
        self.num_snapshots = engine.num_snapshots if config.state_layers else 0
        self._fitting = fitting or Fitting(original=config, config=config)
        self.static = DecoderStatic(self.config, weights, engine.of_programs, self._rules, processors, self.stages)
        self._placed = mesh is not None or leaves is not None
        self.leaves: Sequence[jax.Array | jax.ShapeDtypeStruct] = self._shapes() if leaves is None else list(leaves)
        self.cache_places = self.config.cache_places
        self.caches = [self._cache(layer, slice_pages or num_pages) for layer in self.config.cached_layers]
        if slice_pages and (config.state_layers or config.shares_kv or len(pages_by_shape(self.caches)) > 1):
            raise ValueError(
                "kv_offload is not implemented for layers of different KV heads or head sizes, that share keys and "
                "values, or with recurrent states: leave it out."
            )
        self.state = self._state()
        self.adapters = self._adapters(family) if engine.max_adapters else None

    @classmethod
    def from_model(
        cls,
        model: OpenedModel,
        engine: EngineConfig,
        *,
        num_pages: int,
        slice_pages: int = 0,
        processors: LogitsProcessors = (),
        only: Callable[[str], bool] = lambda name: True,
    ) -> "DeviceLayout":
        """The layout of a loaded model; for a model that is only opened, the shapes alone.

        only: for a model that is not loaded, which leaves are to be on the devices all the time, by name.
        """
        assert isinstance(model.config, DecoderConfig)
        leaves = model.leaves.values() if isinstance(model, LoadedModel) else model.placed_shapes(only)
        return cls(
            model.config,
            model.weights,
            engine,
            num_pages=num_pages,
            slice_pages=slice_pages,
            platform=model.platform,
            processors=processors,
            mesh=model.mesh,
            rules=model.rules,
            leaves=leaves,
            fitting=model.fitting,
            family=model.description.family,
        )

    @property
    def of_programs(self) -> "DeviceLayout":
        """The layout with shapes in place of the weights, as `shapes_of` says."""
        layout = copy.copy(self)
        layout.leaves = shapes_of(self.leaves)
        return layout

    # Shapes

    def place(self, x: Any, *axes: str | None) -> Any:
        """Add where the array lives whose dimensions have these names; no names: whole on every device."""
        if not self._placed:
            return x
        sharding = sharding_on(self.mesh, self._rules, axes or [None] * len(x.shape), x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def stack_stages(self, x: Any, *axes: str | None) -> Any:
        """Turn the shape of one stage's array, whose dimensions have these names, into that of all stages'."""
        if not self._placed:
            return x
        return placed_leaf(Leaf(x.shape, x.dtype.name, axes), self.mesh, self._rules, staged=True)

    def _shapes(self) -> list[jax.ShapeDtypeStruct]:
        if self.stages is not None:
            leaves = self.stages.leaves(self.weights).values()
            return [placed_leaf(x.leaf, self.mesh, self._rules, staged=bool(x.parts)) for x in leaves]
        leaves = canonical_leaves(self.config, self.weights).values()
        return [self.place(jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)), *x.axes) for x in leaves]

    def layer_leaves(self, layer: int, expert: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the weights of a layer, or of one of its experts, as they come to the devices.

        In the order in which programs take them.
        """

        def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
            x = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
            if not self._placed:
                return x
            return x.update(sharding=fetch_sharding_on(self.mesh, self._rules, leaf.axes, leaf.shape))

        return [shape(leaf) for leaf in leaves_of_part(self.config, self.weights, layer, expert).values()]

    def stack_lanes(self, x: Any) -> Any:
        """Turn the shape of one lane's array into that of all lanes', one after the other; a scalar is for all."""
        if not x.shape:
            return self.place(x)
        shape = jax.ShapeDtypeStruct((self.lanes * x.shape[0], *x.shape[1:]), x.dtype)
        return self.place(shape, "batch", *[None] * (len(x.shape) - 1))

    def inputs(self, *shapes: Any) -> tuple[Any, ...]:
        """The shapes of arguments from the host, from those of one lane."""
        return jax.tree.map(self.stack_lanes, shapes) if self.mesh is not None else shapes

    def slots(self, count: int) -> Slots:
        """The shapes of `Slots` with `count` rows."""
        options = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype),
            sampling_arrays([idle_options(len(self.static.processors))]),
        )
        vector = integers(count)
        return Slots(integers(count, self.engine.context), vector, vector, options)

    def rows(self, batch: int, pages: int) -> Rows:
        """The shapes of a batch's `Rows`, whose page tables have `pages` entries."""
        return Rows(integers(batch), integers(batch, pages))

    def bitmask(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of the bitmask of tokens that some rows may choose."""
        return jax.ShapeDtypeStruct((rows, bitmask_words(self.config.vocab)), np.uint32)

    def block(self, count: int) -> PageBlock:
        """The shapes of a block with `count` pages of each lane."""
        groups = [list(group.values()) for group in pages_by_shape(self.caches)]

        def stack(field: str, *names: str) -> tuple[Any, ...]:
            shapes = [
                jax.ShapeDtypeStruct((self.lanes * count, len(layers), 2, *x.shape[1:]), x.dtype)
                for layers in groups
                if (x := getattr(layers[0], field)) is not None
            ]
            return tuple(self.stack_stages(shape, "pages", None, None, *names) for shape in shapes)

        return PageBlock(stack("k", "page", "kv_heads", "head_dim"), stack("k_scale", "kv_heads"))

    @property
    def host_page(self) -> PageBlock:
        """The shapes of a page of a lane on the host, [S, L, ...]: of all stages."""

        def on_host(x: Any) -> Any:
            return jax.ShapeDtypeStruct((self.num_stages, *x.shape[1:]), x.dtype)

        return jax.tree.map(on_host, self.block(1))

    def states(self) -> StateBlock:
        """The shapes of a row of states of each lane, of all layers that have some."""
        layers = range(self.config.layers)
        mixers = [kind.mixer for layer in layers if not (kind := self.config.layer(layer)).has_attention]
        return StateBlock(tuple(jax.tree.leaves([self._recurrent(mixer, 1) for mixer in mixers])))

    @property
    def host_states(self) -> StateBlock:
        """The shapes of a row of states of a lane on the host, [S, ...]: of all stages."""
        shapes = [jax.ShapeDtypeStruct((self.num_stages, *x.shape[1:]), x.dtype) for x in self.states().arrays]
        return StateBlock(tuple(shapes))

    def block_shardings(self, count: int) -> Any:
        """The places of the block that a program returns, as `state_shardings`."""
        return self.shardings_of(self.block(count))

    def caches_of(self, layers: range) -> list[Cache]:
        """The shapes of the caches that these layers use, as their programs take them."""
        return [self.caches[place] for place in dict.fromkeys(self.cache_places[layers.start : layers.stop])]

    def _cache(self, layer: int, pages: int) -> Cache:
        """The shapes of a layer's cache, with so many pages of each lane."""
        kind = self.config.layer(layer)
        if kind.has_attention:
            return self.layer_pages(layer, pages)
        return self._recurrent(kind.mixer, self.engine.max_batch + 1 + self.num_snapshots)

    def layer_pages(self, layer: int, count: int) -> KVPages:
        """The shapes of so many pages of each lane, of one layer."""
        kv_dtype, attention = self.engine.kv_dtype, self.config.layer(layer).attention
        dtype = self.weights.dtype if kv_dtype is None else np.dtype(kv_dtype)
        sizes = self.lanes * count, self.engine.page_size, attention.kv_heads, attention.head_dim

        def page(x: Any) -> Any:
            names = ("pages", "page", "kv_heads", "head_dim") if len(x.shape) == 4 else ("pages", "kv_heads")
            return self.stack_stages(x, *names)

        return jax.tree.map(page, KVPages.shapes(*sizes, dtype, int8=kv_dtype == "int8"))

    def _state(self) -> DeviceState:
        slots = jax.tree.map(self.stack_lanes, self.slots(self.engine.max_batch + 1))
        return DeviceState([] if self.slice_pages else self.caches, slots)

    def _recurrent(self, mixer: Mixer, rows: int) -> RecurrentState:
        """The shapes of so many rows of states of each lane, of one layer."""
        window = self.engine.num_speculative_tokens
        shapes = recurrent_shapes(mixer, self.lanes * rows, self.weights.dtype, window=window)
        return jax.tree.map(lambda x, axes: self.stack_stages(x, *axes), shapes, state_axes(shapes))

    def _adapters(self, family: str) -> list[LayerAdapters]:
        original = self._fitting.original
        assert isinstance(original, DecoderConfig)
        shapes = adapter_shapes(family, original, self.engine.max_lora_rank)

        def stack(field: str, linear: str) -> LowRankStack:
            (rank, inputs), (outputs, _) = shapes[linear]
            out_axis, in_axis = ADAPTER_AXES[field]
            fitted = self._fitting.size(linear)
            inputs, outputs = fitted if in_axis else inputs, fitted if out_axis else outputs
            count, dtype = self.engine.max_adapters, self.weights.dtype
            a = self.stack_stages(jax.ShapeDtypeStruct((count, rank, inputs), dtype), None, None, in_axis)
            b = self.stack_stages(jax.ShapeDtypeStruct((outputs, count, rank), dtype), out_axis, None, None)
            return LowRankStack(a, b)

        linears = [
            {field: self._linear(self._example(position), field) for field in LayerAdapters._fields}
            for position in range(self.config.layers)
        ]
        return [
            LayerAdapters(**{field: stack(field, linear) for field, linear in of_layer.items() if linear in shapes})
            for of_layer in linears
        ]

    def _linear(self, layer: int, field: str) -> str:
        """The linear of a layer that a field of its `LayerAdapters` is of."""
        assert isinstance(self._fitting.original, DecoderConfig)
        mixer = "attention" if self._fitting.original.layer(layer).has_attention else "delta_rule"
        return f"layers.{layer}.{'mlp' if field in ('gate_up', 'down') else mixer}.{field}"

    def _example(self, position: int) -> int:
        """The index of a layer with the sizes of those at a position."""
        return position if self.stages is None else self.stages.example(position)

    def one_adapter(self) -> list[LayerAdapters]:
        """The shapes of what `adapter_layers` returns."""
        assert self.adapters is not None

        def pair(field: str, stack: LowRankStack) -> LowRankStack:
            out_axis, in_axis = ADAPTER_AXES[field]
            (_, rank, inputs), outputs = stack.a.shape, len(stack.b) // self.num_stages
            a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rank, inputs), (outputs, rank)))
            return LowRankStack(self.stack_stages(a, None, in_axis), self.stack_stages(b, out_axis, None))

        return [
            LayerAdapters(**{field: pair(field, stack) for field, stack in layer._asdict().items() if stack})
            for layer in self.adapters
        ]

    def adapter_layers(self, adapter: Adapter | None) -> list[LayerAdapters]:
        """One adapter's matrices, as numpy arrays; zeros for linears that it does not adapt."""
        assert self.adapters is not None

        def matrices_of(layer: int | None, field: str, stack: LowRankStack) -> tuple[np.ndarray, np.ndarray]:
            linear = "" if layer is None else self._linear(layer, field)
            if adapter is not None and (matrices := adapter.layers.get(linear)):
                out_axis, in_axis = ADAPTER_AXES[field]
                a = self._fitting.take(linear, matrices.a, 1) if in_axis else matrices.a
                b = self._fitting.take(linear, matrices.b, 0) if out_axis else matrices.b
                return a, b
            (_, rank, inputs), outputs = stack.a.shape, len(stack.b) // self.num_stages
            return np.zeros((rank, inputs), np.float32), np.zeros((outputs, rank), np.float32)

        def pair(position: int, field: str, stack: LowRankStack) -> LowRankStack:
            layers = (position,) if self.stages is None else self.stages.at(position)
            parts = [matrices_of(layer, field, stack) for layer in layers]
            a, b = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
            return LowRankStack(a, b)  # type: ignore[arg-type]  # numpy until it is sent

        return [
            LayerAdapters(**{field: pair(i, field, stack) for field, stack in layer._asdict().items() if stack})
            for i, layer in enumerate(self.adapters)
        ]

    # Shared by programs

    @property
    def state_shardings(self) -> Any:
        """Where a program's state is placed: on a mesh where it was; else the compiler knows."""
        return self.shardings_of(self.state)

    def shardings_of(self, shapes: Any) -> Any:
        """The places of arrays of these shapes, as `state_shardings`."""
        return None if self.mesh is None else jax.tree.map(lambda x: x.sharding, shapes)

    @property
    def output_sharding(self) -> Any:
        """Where a program's results are placed, a pytree prefix: each lane's, one after the other.

        A program that goes through stages has them where the last stage is.
        """
        if self.mesh is None:
            return None
        shape = [self.num_stages * self.lanes]
        return self._rules.sharding(self.mesh, ["batch"], shape, staged=self.stages is not None)

    def compiler_options(self, *, tokens: int) -> dict[str, str | bool | int]:
        """Return XLA's options for a pass over this many tokens."""
        return compiler_options(
            self.platform,
            rows=tokens,
            dtype=self.weights.matrix_dtype,
            weight_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves),
            devices=1 if self.mesh is None else self.mesh.size,
        )
