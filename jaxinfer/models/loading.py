"""From a model directory to a model on its devices, and back.

`config.json` says what the model is (`Description`); the Orbax checkpoint holds its leaves.
Loading places each leaf where it will be used and, if asked, quantises it, one at a time.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, Sharding, SingleDeviceSharding

import checkpoints
from checkpoints import CheckpointError, Leaf, Manifest
from checkpoints.reading import GROUP_BYTES
from jaxinfer.models.config import DecoderConfig, EncoderConfig, ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.encoder import Encoder
from jaxinfer.models.linear import WeightFormat
from pallas_kernels.weights import STORED_AS, QuantizedFormat
from pallas_kernels.weights import quantize as quantize_matrix
from sharding import MeshConfig, ShardingRules

CONFIG = "config.json"
DTYPES = ("float32", "bfloat16", "float16")


class _ConfigFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`config.json` as it is written."""

    kind: Literal["decoder", "encoder"]
    family: str
    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: QuantizedFormat | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a model directory holds, from its `config.json`.

    Attributes:
      family: Hugging Face's `model_type`, or a name of the author's.
      dtype: of the matrices as stored; of a quantised model, what its activations are computed in.
      quantization: "int8", "int4" or "fp8" where the matrices are stored so.
      bos_id, eos_ids: the token that begins a text, and those that end one.
    """

    family: str
    config: ModelConfig
    dtype: str = "float32"
    quantization: QuantizedFormat | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, DTYPES)
        quantization(self.quantization)

    @property
    def kind(self) -> Literal["decoder", "encoder"]:
        return "decoder" if isinstance(self.config, DecoderConfig) else "encoder"

    @property
    def stored(self) -> WeightFormat:
        """The format of the checkpoint's leaves."""
        return WeightFormat(dtype=jnp.dtype(self.dtype), quantized=self.quantization)

    def to_json(self) -> bytes:
        """The content of `config.json`."""
        fields = msgspec.to_builtins(self, builtin_types=(tuple,)) | {"kind": self.kind}
        return msgspec.json.format(msgspec.json.encode(msgspec.convert(fields, _ConfigFile)), indent=2) + b"\n"

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Description":
        """Read `config.json`; what it says and this version does not know is refused."""
        file = pathlib.Path(folder) / CONFIG
        if not file.is_file():
            raise CheckpointError(
                f"{folder}: no {CONFIG}; make a model directory with `jaxinfer convert HF_DIR OUT_DIR`."
            )
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_ConfigFile)
            config = msgspec.convert(found.config, DecoderConfig if found.kind == "decoder" else EncoderConfig)
            if unknown := sorted(_unknown_fields(found.config, msgspec.to_builtins(config), "config")):
                raise ValueError(f"unknown fields {', '.join(unknown)}")
        except ValueError as error:
            raise CheckpointError(
                f"{file}: {error}; convert the model again, or take the version of jaxinfer that wrote it."
            ) from error
        return cls(
            family=found.family,
            config=config,
            dtype=found.dtype,
            quantization=found.quantization,
            bos_id=found.bos_id,
            eos_ids=found.eos_ids,
        )


def _unknown_fields(given: dict[str, Any], known: dict[str, Any], where: str) -> Iterator[str]:
    for name, value in given.items():
        if name not in known:
            yield f"{where}.{name}"
        elif isinstance(value, dict) and isinstance(known[name], dict):
            yield from _unknown_fields(value, known[name], f"{where}.{name}")


def require_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        known = ", ".join(choice for choice in choices if choice is not None)
        raise ValueError(f"{name}={value!r} is not implemented; known: {known}.")


def quantization(name: str | None) -> QuantizedFormat | None:
    """The format of matrices that goes by this name. Raises ValueError with the names there are."""
    require_choice("quantize", name, (None, *STORED_AS))
    return cast(QuantizedFormat | None, name)


# Models without weights.


def abstract_model(config: ModelConfig, weights: WeightFormat) -> Decoder | Encoder:
    """The model with shapes in place of arrays."""
    if isinstance(config, DecoderConfig):
        return nnx.eval_shape(lambda: Decoder(config, weights, rngs=nnx.Rngs(0)))
    return nnx.eval_shape(lambda: Encoder(config, weights, rngs=nnx.Rngs(0)))


def describe_leaves(model: nnx.Module | nnx.State) -> dict[str, Leaf]:
    """Shape, dtype and logical axes of every leaf, by its name on disk."""
    return {
        name: Leaf(variable.shape, variable.dtype.name, variable.get_metadata("axes"))
        for name, variable in _variables(model).items()
    }


def canonical_leaves(config: ModelConfig, weights: WeightFormat) -> dict[str, Leaf]:
    """The leaves of a checkpoint that holds a model in this dtype and quantisation."""
    return describe_leaves(abstract_model(config, weights))


def _variables(model: nnx.Module | nnx.State) -> dict[str, nnx.Variable]:
    state = model if isinstance(model, nnx.State) else nnx.state(model, nnx.Param)
    return {leaf_name(path): variable for path, variable in nnx.to_flat_state(state)}


# Where a module's attribute and the name on disk differ. No attribute may be called by a name on the right.
_NAMES_ON_DISK = {"weight": "kernel", "gate_up": "up"}


def leaf_name(path: tuple[object, ...]) -> str:
    """The leaf that holds a parameter: `layers.0.mlp.up.kernel` for `layers[0].mlp.gate_up.weight`."""
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

    def sharding(self, *axes: str | None, shape: tuple[int, ...]) -> Sharding:
        """Where an array whose dimensions carry these logical names lives beside the weights."""
        return _sharding(self.mesh, self.rules, axes, shape)


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
    mesh = _build_mesh(mesh)
    if dtype is None and _devices(mesh)[0].platform == "cpu":
        dtype = "float32"  # a CPU converts halves back and forth
    weights = weight_format(description, dtype=dtype, quantize=quantize)
    _check_leaves(folder, manifest, description)
    model = abstract_model(description.config, weights)
    targets = describe_leaves(model)
    _check_memory(folder, bytes_per_device(targets, mesh, rules) + min(manifest.bytes, GROUP_BYTES), mesh)

    arrays: dict[str, jax.Array] = {}
    for name, array in checkpoints.stream(folder, mesh=mesh, rules=rules, dtype=weights.dtype):
        for part, value in _adapt(name, array, targets[name]).items():
            leaf = targets[part]
            arrays[part] = jax.device_put(value, _sharding(mesh, rules, leaf.axes, leaf.shape))
            arrays[part].block_until_ready()  # else reading runs ahead and the originals pile up
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
    """Write a float model as a model directory, which must not exist or be empty.

    Args:
      family: a name for `jaxinfer info`.
      dtype: what the matrices are stored in.
      tokenizer: files beside the weights by name, such as {"tokenizer.json": b"..."}.
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


def _build_mesh(mesh: Mesh | MeshConfig | str | os.PathLike[str] | None) -> Mesh | None:
    if isinstance(mesh, (str, os.PathLike)):
        mesh = MeshConfig.read(mesh)
    return mesh.build() if isinstance(mesh, MeshConfig) else mesh


def _devices(mesh: Mesh | None) -> list[Any]:  # jax.Device has no static type
    return jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)


def _sharding(
    mesh: Mesh | None, rules: ShardingRules, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(_devices(mesh)[0])
    return rules.sharding(mesh, axes, shape)


def weight_format(description: Description, *, dtype: str | None = None, quantize: str | None = None) -> WeightFormat:
    """The format asked for; None: as stored."""
    require_choice("dtype", dtype, (None, *DTYPES))
    wanted, stored = quantization(quantize), description.quantization
    if stored is not None and wanted not in (None, stored):
        raise ValueError(f"quantize={wanted!r} needs the float model, this one is stored in {stored}: convert again.")
    return WeightFormat(dtype=jnp.dtype(dtype or description.dtype), quantized=wanted or stored)


def _check_leaves(folder: pathlib.Path, manifest: Manifest, description: Description) -> None:
    """The checkpoint holds exactly the leaves that its config needs; everything that differs is listed."""
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
    """A stored leaf as the model holds it: if that is quantised, a matrix and its scales."""
    wanted = quantized_format(target.dtype)
    if wanted is None or quantized_format(array.dtype) == wanted:
        return {name: array}
    kernel, scale = quantize_matrix(array, wanted)
    assert scale is not None
    return {name: kernel, scale_name(name): scale}


def scale_name(name: str) -> str:
    """The leaf that holds the scales of a quantised matrix: `a.kernel` -> `a.scale`."""
    return name.rpartition(".")[0] + ".scale"


def quantized_format(dtype: jax.typing.DTypeLike) -> QuantizedFormat | None:
    """The format whose kernels have this dtype; None for a float."""
    return next((name for name, stored in STORED_AS.items() if stored == jnp.dtype(dtype)), None)


# Memory.


def bytes_per_device(leaves: Mapping[str, Leaf], mesh: Mesh | AbstractMesh | None, rules: ShardingRules) -> int:
    """Bytes of these leaves that each device holds."""
    total = 0
    for leaf in leaves.values():
        shape = leaf.shape if mesh is None else rules.sharding(mesh, leaf.axes, leaf.shape).shard_shape(leaf.shape)
        total += math.prod(shape) * np.dtype(leaf.dtype).itemsize
    return total


def cache_leaves(config: ModelConfig, weights: WeightFormat, batch: int, context: int) -> dict[str, Leaf]:
    """Keys and values of `batch` requests of `context` tokens, as leaves; an encoder keeps none."""
    if not isinstance(config, DecoderConfig):
        return {}
    shape = (batch, context, config.attention.kv_heads, config.attention.head_dim)
    pages = Leaf(shape, weights.dtype.name, ("pages", "page", "kv_heads", "head_dim"))
    return {f"{name}.{layer}": pages for layer in range(config.layers) for name in ("keys", "values")}


def available_bytes(mesh: Mesh | None = None) -> int:
    """Memory that is free for arrays on each device; CPU devices share the host's."""
    stats = _devices(mesh)[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return _host_available_bytes()


def _host_available_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """What the machine has free, or what this process's container may still take."""
    if not (meminfo := root / "proc/meminfo").exists():  # macOS: the whole memory is the best that can be said
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = root / "sys/fs/cgroup"
    if (limit := group / "memory.max").exists() and (most := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])  # less what can be dropped
        available = min(available, int(most) - used)
    return available


def _check_memory(folder: pathlib.Path, needed: int, mesh: Mesh | None) -> None:
    devices = _devices(mesh)
    if devices[0].platform == "cpu":
        needed *= len(devices)  # they share the host's memory
    if needed > (available := available_bytes(mesh)):
        raise MemoryError(
            f"{folder}: loading needs {needed / 2**30:.2f} GiB of memory and {available / 2**30:.2f} GiB are "
            "available; use quantize='int4', a smaller dtype, or a mesh with more devices."
        )
