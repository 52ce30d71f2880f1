"""From a model directory to a model on its devices, and back.

`config.json` says what the model is (`Description`); the Orbax checkpoint has its leaves.
Loading takes one leaf at a time: it places the leaf where it will be used and quantises it if asked to.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

import checkpoints
from checkpoints import CheckpointError, Leaf, Manifest
from checkpoints.reading import GROUP_BYTES
from jaxinfer.models import devices
from jaxinfer.models.config import DecoderConfig, ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.description import CONFIG, Description, weight_format
from jaxinfer.models.encoder import Encoder
from jaxinfer.models.linear import WeightFormat
from pallas_kernels.weights import STORED_AS, QuantizedFormat
from pallas_kernels.weights import quantize as quantize_matrix
from sharding import MeshConfig, ShardingRules

# Models without weights.


def abstract_model(config: ModelConfig, weights: WeightFormat) -> Decoder | Encoder:
    """The model with shapes in place of arrays."""
    if isinstance(config, DecoderConfig):
        return nnx.eval_shape(lambda: Decoder(config, weights, rngs=nnx.Rngs(0)))
    return nnx.eval_shape(lambda: Encoder(config, weights, rngs=nnx.Rngs(0)))


@functools.cache
def _split_abstract(config: ModelConfig, weights: WeightFormat) -> tuple[nnx.GraphDef, Any, list[Any]]:
    """The abstract model's graph, the tree of its state, and the shapes of its leaves."""
    graphdef, state = nnx.split(abstract_model(config, weights))
    shapes, treedef = jax.tree.flatten(state)
    return graphdef, treedef, shapes


def abstract_leaves(config: ModelConfig, weights: WeightFormat) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the weights, in the order in which `merge_model` takes them."""
    return list(_split_abstract(config, weights)[2])


def merge_model(config: ModelConfig, weights: WeightFormat, leaves: list[jax.Array]) -> Decoder | Encoder:
    """The model with these weights, in the order of `jax.tree.leaves(LoadedModel.state)`."""
    graphdef, treedef, _ = _split_abstract(config, weights)
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def describe_leaves(model: nnx.Module | nnx.State) -> dict[str, Leaf]:
    """Shape, dtype and logical axes of every leaf, by its name on disk."""
    return {
        name: Leaf(variable.shape, variable.dtype.name, variable.get_metadata("axes"))
        for name, variable in _variables(model).items()
    }


def canonical_leaves(config: ModelConfig, weights: WeightFormat) -> dict[str, Leaf]:
    """The leaves of a checkpoint of this model in this format."""
    return describe_leaves(abstract_model(config, weights))


def cache_leaves(config: ModelConfig, weights: WeightFormat, batch: int, context: int) -> dict[str, Leaf]:
    """Keys and values of `batch` requests of `context` tokens, as leaves; an encoder has none."""
    if not isinstance(config, DecoderConfig):
        return {}
    shape = (batch, context, config.attention.kv_heads, config.attention.head_dim)
    pages = Leaf(shape, weights.dtype.name, ("pages", "page", "kv_heads", "head_dim"))
    return {f"{name}.{layer}": pages for layer in range(config.layers) for name in ("keys", "values")}


def _variables(model: nnx.Module | nnx.State) -> dict[str, nnx.Variable]:
    state = model if isinstance(model, nnx.State) else nnx.state(model, nnx.Param)
    return {leaf_name(path): variable for path, variable in nnx.to_flat_state(state)}


# The parts of a path that are spelled differently on disk. No attribute may have a name from the right side.
_NAMES_ON_DISK = {"weight": "kernel", "gate_up": "up"}


def leaf_name(path: tuple[object, ...]) -> str:
    """A parameter's name on disk, from its path: `layers.0.mlp.up.kernel` for `layers[0].mlp.gate_up.weight`."""
    return ".".join(_NAMES_ON_DISK.get(str(part), str(part)) for part in path)


# Models with weights.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model on its devices, split for compiled programs: `nnx.merge(graphdef, state)` is the module.

    Attributes:
      folder: the model directory, where the tokenizer is.
      weights: the format of the leaves in `state`.
      mesh: the devices, or None for one device.
    """

    folder: pathlib.Path
    description: Description
    weights: WeightFormat
    mesh: Mesh | None
    rules: ShardingRules
    graphdef: nnx.GraphDef
    state: nnx.State

    @property
    def config(self) -> ModelConfig:
        return self.description.config

    @property
    def bos_id(self) -> int | None:
        return self.description.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.description.eos_ids

    @property
    def platform(self) -> str:
        """What its devices are: "cpu", "gpu"."""
        return devices.devices_of(self.mesh)[0].platform

    def sharding(self, *axes: str | None, shape: tuple[int, ...]) -> Sharding:
        """Where an array with these logical axes lives, next to the weights."""
        return devices.sharding_on(self.mesh, self.rules, axes, shape)


def load_model(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | MeshConfig | str | os.PathLike[str] | None = None,
    rules: ShardingRules | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> LoadedModel:
    """Load a model directory.

    Args:
      mesh: the devices, their config, or a TOML file with a [mesh] table; None: the first device.
      rules: which dimension of a weight is split over which mesh axis.
      dtype: "float32", "bfloat16" or "float16"; None: as stored, except that a CPU computes in float32.
      quantize: "int8", "int4" or "fp8" quantises a float checkpoint while loading; None: as stored.
    Raises CheckpointError if files, config and weights do not fit together, and MemoryError before any weight is
    read if they do not fit the devices.
    """
    folder, rules = pathlib.Path(path), rules or ShardingRules()
    manifest, description = checkpoints.read_manifest(folder), Description.read(folder)
    mesh = devices.build_mesh(mesh)
    if dtype is None:
        dtype = devices.default_dtype(mesh)
    weights = weight_format(description, dtype=dtype, quantize=quantize)
    _check_leaves(folder, manifest, description)
    model = abstract_model(description.config, weights)
    targets = describe_leaves(model)
    needed = devices.bytes_per_device(targets, mesh, rules) + min(manifest.bytes, GROUP_BYTES)
    devices.check_memory(folder, needed, mesh)

    arrays: dict[str, jax.Array] = {}
    for name, array in checkpoints.stream(folder, mesh=mesh, rules=rules, dtype=weights.dtype):
        for part, value in _adapt(name, array, targets[name]).items():
            leaf = targets[part]
            arrays[part] = jax.device_put(value, devices.sharding_on(mesh, rules, leaf.axes, leaf.shape))
            arrays[part].block_until_ready()  # otherwise reading runs ahead and the originals pile up
    graphdef, state = nnx.split(model)
    filled = {path: variable.replace(arrays[leaf_name(path)]) for path, variable in nnx.to_flat_state(state)}
    return LoadedModel(
        folder=folder,
        description=description,
        weights=weights,
        mesh=mesh,
        rules=rules,
        graphdef=graphdef,
        state=nnx.from_flat_state(filled),
    )


def save_model(
    path: str | os.PathLike[str],
    model: Decoder | Encoder,
    *,
    family: str,
    dtype: str = "float32",
    tokenizer: Mapping[str, bytes | pathlib.Path] | None = None,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
) -> None:
    """Write a float model as a model directory. The directory must be empty or not exist.

    Args:
      family: a name for `jaxinfer info`.
      dtype: of the stored matrices.
      tokenizer: further files of the directory by name, such as {"tokenizer.json": b"..."}.
      bos_id: the token that begins a text.
      eos_ids: the tokens that end one.
    """
    variables = _variables(model)
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
    )


def _check_leaves(folder: pathlib.Path, manifest: Manifest, description: Description) -> None:
    """Raise CheckpointError unless the leaves are exactly those of the config; the error lists every difference."""
    wanted, found = canonical_leaves(description.config, description.stored), manifest.leaves
    differing = [
        f"{name} is {found[name]}, not {leaf}" for name, leaf in wanted.items() if name in found and found[name] != leaf
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names)}"
        for kind, names in (
            ("missing", sorted(wanted.keys() - found.keys())),
            ("unexpected", sorted(found.keys() - wanted.keys())),
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
    wanted = quantized_format(target.dtype)
    if wanted is None or quantized_format(array.dtype) == wanted:
        return {name: array}
    matrix, scale = quantize_matrix(array, wanted)
    assert scale is not None
    return {name: matrix, scale_name(name): scale}


def scale_name(name: str) -> str:
    """The leaf with the scales of a quantised matrix: `a.kernel` -> `a.scale`."""
    return name.rpartition(".")[0] + ".scale"


def quantized_format(dtype: jax.typing.DTypeLike) -> QuantizedFormat | None:
    """The format whose matrices have this dtype; None for a float."""
    return next((name for name, stored in STORED_AS.items() if stored == jnp.dtype(dtype)), None)
