"""From a model directory to a model on its devices, and back.

`config.json` says what the model is (`Description`); the checkpoint has its leaves.
Loading takes one leaf at a time: it places the leaf where it will be used and quantises it if asked to.
"""

import dataclasses
import functools
import math
import os
import pathlib
import types
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxinfer import checkpoints
from jaxinfer.checkpoints import CheckpointError, Layout, Leaf, Manifest
from jaxinfer.checkpoints.host_memory import ARRAY_ALIGNMENT, WeightMemory
from jaxinfer.checkpoints.manifest import part_name, part_of
from jaxinfer.checkpoints.reading import GROUP_BYTES
from jaxinfer.models import devices
from jaxinfer.models.config import DecoderConfig, ModelConfig, TransformerConfig
from jaxinfer.models.files.description import CONFIG, Description, require_transformer, weight_format
from jaxinfer.models.fitting import Fitting, fit
from jaxinfer.models.leaves import canonical_leaves, layer_of, leaves_of_part, quantized_format, scale_name
from jaxinfer.models.stages import StageLeaf, Stages, stages_on
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.weights import QuantizedFormat, Weights
from jaxinfer.pallas_kernels.weights import quantize as quantize_matrix
from jaxinfer.progress import long_work
from jaxinfer.sharding import MeshConfig, MeshFile, ShardingRules, axes_text

if TYPE_CHECKING:
    from flax import nnx

    from jaxinfer.models.abstract import Model


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    """A model directory, checked and fitted to its devices, before any weight is read.

    Attributes:
      folder: the model directory, where the tokenizer is.
      manifest: what the directory holds.
      description: of the stored model.
      fitting: how it is fitted to the mesh.
      weights: the format of the leaves.
      mesh: the devices, or None for one device.
      rules: what is split over which mesh axis.
    """

    folder: pathlib.Path
    manifest: Manifest
    description: Description
    fitting: Fitting
    weights: WeightFormat
    mesh: Mesh | None
    rules: ShardingRules

    def load(self) -> "LoadedModel":
        """Load the whole model on its devices. Raises MemoryError if it does not fit them."""
        needed = self.bytes_per_device() + min(self.manifest.bytes, GROUP_BYTES)
        devices.check_memory(self.folder, needed, self.mesh, self.remedy)
        return LoadedModel(**self.fields(), leaves=self.read(stays=True))

    def without_weights(self) -> "LoadedModel":
        """The model as it is while its engine sleeps: with shapes in place of weights."""
        leaves = dict(zip(self.stage_leaves, self.placed_shapes(), strict=True))
        return LoadedModel(**self.fields(), leaves=leaves)  # type: ignore[arg-type]

    def for_context(self, context: int) -> "OpenedModel":
        """The model of an engine whose requests have at most so many tokens."""
        fitted, original = self.fitting.config, self.fitting.original
        if not isinstance(fitted, DecoderConfig) or not isinstance(original, DecoderConfig):
            return self
        fitting = dataclasses.replace(
            self.fitting, config=fitted.for_context(context), original=original.for_context(context)
        )
        return dataclasses.replace(self, fitting=fitting)

    def fields(self) -> dict[str, Any]:
        """The fields that a `LoadedModel` takes beside its weights."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(OpenedModel)}

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.folder.resolve().name

    @property
    def config(self) -> ModelConfig:
        """The config of the model on the devices: that of the description, fitted to the mesh."""
        return self.fitting.config

    @property
    def transformer(self) -> TransformerConfig:
        """The config on the devices of a decoder or an encoder. Raises ValueError for a model that reads images."""
        return require_transformer(self.folder, self.config)

    @property
    def bos_id(self) -> int | None:
        return self.description.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.description.eos_ids

    @property
    def platform(self) -> str:
        """The kind of its devices: "cpu", "gpu"."""
        return devices.devices_of(self.mesh)[0].platform

    @property
    def mesh_text(self) -> str:
        """The mesh and its rules in words, by which records of costs differ; empty for one device."""
        axes = "" if self.mesh is None else axes_text(self.mesh)
        return f"{axes}, {self.rules}" if axes and self.rules != ShardingRules() else axes

    @property
    def lanes(self) -> int:
        """How many groups of its devices have different requests."""
        return self.rules.lanes(self.mesh)

    @functools.cached_property
    def stages(self) -> Stages | None:
        """The layers of each stage of a pipeline; None: each device has parts of all layers."""
        return stages_on(self.config, self.mesh, self.rules)

    @property
    def remedy(self) -> str:
        """The advice where weights do not fit; those of lanes and of stages are not streamed."""
        streamed = "weights='auto', " if self.lanes == 1 and self.stages is None else ""
        return f"use {streamed}quantize='int4', a smaller dtype, or a mesh with more devices"

    @property
    def shapes(self) -> Mapping[str, Leaf]:
        """The leaves of the model by name; without stages in the order in which programs take them."""
        return canonical_leaves(self.config, self.weights)

    @property
    def stage_leaves(self) -> Mapping[str, StageLeaf]:
        """The leaves that programs take, by name, in their order: with stages by position."""
        if self.stages is None:
            return {name: StageLeaf(leaf) for name, leaf in self.shapes.items()}
        return self.stages.leaves(self.weights)

    def sharding(self, leaf: Leaf) -> Sharding:
        """Return where one of `shapes` lives."""
        return devices.sharding_on(self.mesh, self.rules, leaf.axes, leaf.shape)

    @property
    def parameters_per_device(self) -> int:
        """How many numbers of all layers' matrices each device multiplies with, however they are stored."""
        leaves = canonical_leaves(self.config, WeightFormat()).items()
        layers = [leaf for name, leaf in leaves if layer_of(name) is not None]
        return sum(math.prod(self.sharding(leaf).shard_shape(leaf.shape)) for leaf in layers)

    def layer_shapes(self, layer: int, expert: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """The leaves of one layer, or of one of its experts, as they come to the devices.

        In the order in which programs take them.
        """

        def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
            sharding = devices.fetch_sharding_on(self.mesh, self.rules, leaf.axes, leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=sharding)

        return [shape(leaf) for leaf in leaves_of_part(self.config, self.weights, layer, expert).values()]

    def placed_shapes(self, only: Callable[[str], bool] = lambda name: True) -> list[jax.ShapeDtypeStruct]:
        """The leaves that are selected by name, as programs take them."""
        return [self._placed(leaf) for name, leaf in self.stage_leaves.items() if only(name)]

    def _placed(self, leaf: StageLeaf) -> jax.ShapeDtypeStruct:
        return devices.placed_leaf(leaf.leaf, self.mesh, self.rules, staged=bool(leaf.parts))

    def bytes_per_device(self, only: Callable[[str], bool] = lambda name: True) -> int:
        """Return bytes of each device's part of the leaves that are selected by name."""
        chosen = {name: leaf.leaf for name, leaf in self.stage_leaves.items() if only(name)}
        return devices.bytes_per_device(chosen, self.mesh, self.rules)

    def read(
        self, only: Callable[[str], bool] = lambda name: True, *, expert: int | None = None, stays: bool = False
    ) -> dict[str, jax.Array]:
        """Read the leaves that are selected by name, placed, and quantised if the format asks for it; in order.

        expert: which expert's parts alone are returned, by the names of the parts; no other leaf is read.
        stays: whether programs are to take the leaves from where they are; then it is worth a copy to have them lie
          where a CPU reads fast.
        """
        stored = checkpoints.stream(
            self.folder,
            rules=self.rules,
            dtype=self.weights.dtype,
            keep=self._keeps,
            only=only,
            part=expert,
            takes=self.fitting.of_leaf,
            mesh_of=self._mesh_of,
        )
        selected = {name: leaf for name, leaf in self.shapes.items() if only(name) and (expert is None or leaf.parts)}
        arrays: dict[str, jax.Array] = {}
        shapes = [leaf if expert is None else leaf.part for leaf in selected.values()]
        memory = self._weight_memory(shapes) if stays and self.platform == "cpu" else None
        with long_work("loading weights", total=len(selected)) as work:
            for name, array in stored:
                whole, _ = part_of(name)
                for made, value in _adapt(whole, array, self.shapes[whole]).items():
                    leaf = self.shapes[made] if expert is None else self.shapes[made].part
                    sharding = devices.sharding_on(self._mesh_of(made), self.rules, leaf.axes, leaf.shape)
                    placed = jax.device_put(value, sharding)
                    arrays[made] = placed if memory is None else memory.move(placed)
                    arrays[made].block_until_ready()  # otherwise reading runs ahead and the originals pile up
                    work.advance()
        if self.stages is not None:
            return self._join_stages(self.stages, arrays)
        names = [name for name in selected if name in arrays]
        return {name if expert is None else part_name(name, expert): arrays[name] for name in names}

    def _weight_memory(self, leaves: Collection[Leaf]) -> WeightMemory:
        """Return memory of the host for these leaves."""
        room = ARRAY_ALIGNMENT * len(devices.devices_of(self.mesh))  # each device's part may need some more
        return WeightMemory(sum(leaf.bytes + room for leaf in leaves))

    @functools.cached_property
    def _stage_of(self) -> dict[str, int]:
        return {} if self.stages is None else self.stages.stage_of(self.weights)

    def _mesh_of(self, name: str) -> Mesh | None:
        """The devices that a leaf of the model is on: those of its stage."""
        if (stage := self._stage_of.get(name)) is None:
            return self.mesh
        assert self.mesh is not None
        return devices.mesh_of_stage(self.mesh, stage)

    def _join_stages(self, stages: Stages, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Join the leaves as programs take them, from those on the devices of one stage each; copies nothing."""
        return {
            name: self._join_parts(leaf, arrays) if leaf.parts else arrays.pop(name)
            for name, leaf in stages.leaves(self.weights).items()
        }

    def _join_parts(self, leaf: StageLeaf, arrays: dict[str, jax.Array]) -> jax.Array:
        assert self.mesh is not None
        parts, zeros = [], np.zeros(leaf.leaf.shape, leaf.leaf.dtype)
        for stage, name in enumerate(leaf.parts):
            mesh = devices.mesh_of_stage(self.mesh, stage)
            there = devices.sharding_on(mesh, self.rules, leaf.leaf.axes, leaf.leaf.shape)
            parts.append(jax.device_put(zeros, there) if name is None else arrays.pop(name))
        placed = self._placed(leaf)
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(placed.shape, placed.sharding, shards)

    def _keeps(self, name: str) -> bool:
        """Return whether a leaf is read as stored: in its own format, or narrower than what it is quantised from."""
        stored, target = np.dtype(self.manifest.leaves[name].dtype), np.dtype(self.shapes[name].dtype)
        narrower = stored.itemsize < self.weights.dtype.itemsize
        return stored == target or (quantized_format(target) is not None and narrower)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel(OpenedModel):
    """A model on its devices: `nnx.merge(graphdef, state)` is the module.

    Attributes:
      leaves: the weights by name, in the order in which programs take them.
    """

    leaves: dict[str, jax.Array]

    @functools.cached_property
    def graphdef(self) -> "nnx.GraphDef":
        return _abstract().split_model(self.config, self.weights)[0]

    @functools.cached_property
    def state(self) -> "nnx.State":
        if self.stages is not None:
            raise ValueError(
                f"{self.name} is split into {self.stages}, each on its own devices, so it has no state as one module: "
                "load it without a pipeline."
            )
        return _abstract().state_of(self.config, self.weights, self.leaves.values())


def open_model(
    path: str | os.PathLike[str],
    *,
    mesh: devices.AnyMesh = None,
    rules: ShardingRules | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> OpenedModel:
    """Check a model directory, without reading a weight; arguments and errors as of `load_model`, but MemoryError."""
    folder = pathlib.Path(path)
    manifest, description = checkpoints.read_manifest(folder), Description.read(folder)
    mesh, rules = devices.build_mesh(mesh, rules)
    if dtype is None:
        dtype = devices.default_dtype(mesh)
    weights = weight_format(description, dtype=dtype, quantize=quantize)
    _check_leaves(folder, manifest, description)
    try:
        fitting = fit(description.config, weights, mesh, rules, stored=description.quantization)
        stages_on(fitting.config, mesh, rules)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return OpenedModel(
        folder=folder,
        manifest=manifest,
        description=description,
        fitting=fitting,
        weights=weights,
        mesh=mesh,
        rules=rules,
    )


def load_model(
    path: str | os.PathLike[str],
    *,
    mesh: devices.AnyMesh = None,
    device: Any = None,
    rules: ShardingRules | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> LoadedModel:
    """Load a model directory.

    Args:
      mesh: the devices, their config, or a TOML file with a [mesh] table and perhaps one [rules]; None: the first
        device.
      device: the only one to use, in place of a mesh.
      rules: which dimension of a weight is split over which mesh axis; None: those of the file, or the default.
      dtype: "float32", "bfloat16" or "float16"; None: as stored, except that a CPU computes in float32.
      quantize: "int8", "int4" or "fp8" quantises a float checkpoint while loading; None: as stored.
    Raises CheckpointError if files, config and weights do not fit together, and before any weight is read ValueError
    for a mesh that the model cannot be fitted to, and MemoryError if it does not fit the devices.
    """
    if device is not None:
        if mesh is not None:
            raise ValueError(f"load_model takes either a device ({device}) or a mesh, not both.")
        mesh = MeshConfig().build([device])
    mesh = devices.open_mesh(mesh)
    if isinstance(mesh, MeshFile) and mesh.memory:
        raise ValueError(
            f"{mesh.source}: [memory] is for LLM and Embedder; load_model puts all weights on the devices. Remove it."
        )
    return open_model(path, mesh=mesh, rules=rules, dtype=dtype, quantize=quantize).load()


def _abstract() -> types.ModuleType:
    """Import the module that needs Flax, which loading does not."""
    from jaxinfer.models import abstract

    return abstract


def save_model(
    path: str | os.PathLike[str],
    model: "Model",
    *,
    family: str,
    dtype: str = "float32",
    tokenizer: Mapping[str, bytes | pathlib.Path] | None = None,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
    layout: Layout = "orbax",
) -> None:
    """Write a float model as a model directory. The directory must be empty or not exist.

    Args:
      family: a name for `jaxinfer info`.
      dtype: of the stored matrices.
      tokenizer: further files of the directory by name, such as {"tokenizer.json": b"..."}.
      bos_id: the token that begins a text.
      eos_ids: the tokens that end one.
      layout: "orbax", or "single-file" for a small model.
    """
    variables = _abstract().variables(model)
    if any(quantized_format(variable.dtype) for variable in variables.values()):
        raise ValueError("save_model takes a float model; quantise with load_model(quantize=...) or convert.")
    description = Description(family=family, config=model.cfg, dtype=dtype, bos_id=bos_id, eos_ids=eos_ids)
    leaves = canonical_leaves(model.cfg, description.stored)
    arrays = {}
    for name, variable in variables.items():
        arrays[name] = np.asarray(variable[...].astype(leaves[name].dtype))
    checkpoints.save(
        path,
        arrays,
        axes={name: leaf.axes for name, leaf in leaves.items()},
        files={CONFIG: description.to_json(), **(tokenizer or {})},
        layout=layout,
    )


def _check_leaves(folder: pathlib.Path, manifest: Manifest, description: Description) -> None:
    """Raise CheckpointError unless the leaves are exactly those of the config; the error lists every difference."""
    expected, stored = canonical_leaves(description.config, description.stored), manifest.leaves
    differing = [
        f"{name} is {stored[name]}, not {leaf}"
        for name, leaf in expected.items()
        if name in stored and stored[name] != leaf
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names)}"
        for kind, names in (
            ("missing", sorted(expected.keys() - stored.keys())),
            ("unexpected", sorted(stored.keys() - expected.keys())),
            ("mis-shaped", differing),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: the weights do not fit {CONFIG} ({'; '.join(problems)}); convert the model again."
        )


def _adapt(name: str, array: jax.Array, target: Leaf) -> dict[str, jax.Array]:
    """The leaves of the model for one stored leaf: itself, or its quantised matrix and scales."""
    quantized = quantized_format(target.dtype)
    if quantized is None or quantized_format(array.dtype) == quantized:
        return {name: array}
    matrix, scale = _quantize_each(array, quantized) if array.ndim == 3 else quantize_matrix(array, quantized)
    assert scale is not None
    return {name: matrix, scale_name(name): scale}


def _quantize_each(stack: jax.Array, fmt: QuantizedFormat) -> Weights:
    """Quantise matrices one after the other, each device its own: [E, N, K] of all in float32 may be too large."""
    sharding = stack.sharding
    if isinstance(sharding, NamedSharding) and (over := sharding.spec[0]) is not None:
        return _quantize_in_turn(stack, fmt, sharding.mesh, (over,) if isinstance(over, str) else over)
    return _quantize_in_turn(stack, fmt)


@functools.partial(jax.jit, static_argnames=("fmt", "mesh", "over"))
def _quantize_in_turn(
    stack: jax.Array, fmt: QuantizedFormat, mesh: Mesh | None = None, over: tuple[str, ...] = ()
) -> Weights:
    """Quantise matrices that are split over some axes of a mesh; within each of them the compiler sees to others."""

    def in_turn(stack: jax.Array) -> Weights:
        return jax.lax.map(lambda matrix: quantize_matrix(matrix, fmt), stack)

    if over:
        specs = PartitionSpec(over)
        in_turn = jax.shard_map(in_turn, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=set(over))
    return in_turn(stack)
