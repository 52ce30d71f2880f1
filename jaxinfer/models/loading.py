"""From a model directory to a model on its devices, and back.

`config.json` says what the model is (`Description`); the Orbax checkpoint has its leaves.
Loading takes one leaf at a time: it places the leaf where it will be used and quantises it if asked to.
"""

import dataclasses
import functools
import os
import pathlib
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

import checkpoints
from checkpoints import CheckpointError, Leaf, Manifest
from checkpoints.reading import GROUP_BYTES
from jaxinfer.models import devices
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.description import CONFIG, Description, weight_format
from jaxinfer.models.fitting import Fitting, fit
from jaxinfer.models.leaves import canonical_leaves, quantized_format, scale_name
from jaxinfer.models.weight_format import WeightFormat
from pallas_kernels.weights import quantize as quantize_matrix
from sharding import MeshConfig, ShardingRules

if TYPE_CHECKING:
    from flax import nnx

    from jaxinfer.models import Decoder, Encoder


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model on its devices: `nnx.merge(graphdef, state)` is the module.

    Attributes:
      folder: the model directory, where the tokenizer is.
      description: of the stored model.
      fitting: how it was fitted to the mesh.
      weights: the format of the leaves.
      mesh: the devices, or None for one device.
      leaves: the weights by name, in the order in which programs take them.
    """

    folder: pathlib.Path
    description: Description
    fitting: Fitting
    weights: WeightFormat
    mesh: Mesh | None
    rules: ShardingRules
    leaves: dict[str, jax.Array]

    @functools.cached_property
    def graphdef(self) -> "nnx.GraphDef":
        return _abstract().split_model(self.config, self.weights)[0]

    @functools.cached_property
    def state(self) -> "nnx.State":
        return _abstract().state_of(self.config, self.weights, self.leaves.values())

    @property
    def config(self) -> ModelConfig:
        """What is on the devices: that of the description, fitted to the mesh."""
        return self.fitting.config

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
      mesh: the devices, their config, or a TOML file with a [mesh] table and perhaps one [rules]; None: the first
        device.
      rules: which dimension of a weight is split over which mesh axis; None: those of the file, or the default.
      dtype: "float32", "bfloat16" or "float16"; None: as stored, except that a CPU computes in float32.
      quantize: "int8", "int4" or "fp8" quantises a float checkpoint while loading; None: as stored.
    Raises CheckpointError if files, config and weights do not fit together, and before any weight is read ValueError
    for a mesh that the model cannot be fitted to, and MemoryError if it does not fit the devices.
    """
    folder = pathlib.Path(path)
    manifest, description = checkpoints.read_manifest(folder), Description.read(folder)
    mesh, rules = devices.build_mesh(mesh, rules)
    if dtype is None:
        dtype = devices.default_dtype(mesh)
    weights = weight_format(description, dtype=dtype, quantize=quantize)
    _check_leaves(folder, manifest, description)
    fitting = fit(description.config, weights, mesh, rules, stored=description.quantization)
    targets = canonical_leaves(fitting.config, weights)
    needed = devices.bytes_per_device(targets, mesh, rules) + min(manifest.bytes, GROUP_BYTES)
    devices.check_memory(folder, needed, mesh)

    arrays: dict[str, jax.Array] = {}
    for name, array in checkpoints.stream(folder, mesh=mesh, rules=rules, dtype=weights.dtype, takes=fitting.of_leaf):
        for part, value in _adapt(name, array, targets[name]).items():
            leaf = targets[part]
            arrays[part] = jax.device_put(value, devices.sharding_on(mesh, rules, leaf.axes, leaf.shape))
            arrays[part].block_until_ready()  # otherwise reading runs ahead and the originals pile up
    return LoadedModel(
        folder=folder,
        description=description,
        fitting=fitting,
        weights=weights,
        mesh=mesh,
        rules=rules,
        leaves={name: arrays[name] for name in targets},
    )


def _abstract() -> types.ModuleType:
    """What needs Flax, which loading does not."""
    from jaxinfer.models import abstract

    return abstract


def save_model(
    path: str | os.PathLike[str],
    model: "Decoder | Encoder",
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
