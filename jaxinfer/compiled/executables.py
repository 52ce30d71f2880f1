"""Compiled executables on disk, so that a warm start neither traces nor compiles.

A file has XLA's serialised executable and, as JSON, everything else that calling it takes: trees, shapes, shardings.
Nothing is unpickled. XLA's bytes are code, so the folder is the user's alone.

JAX has no public way to make a `jax.stages.Compiled` without tracing; all private API that this needs is used here.
"""

import dataclasses
import functools
import json
import logging
import struct
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, stages
from jax._src.interpreters import pxla
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxinfer.disk_cache import KeptFiles, cache_folder, keys

MAX_BYTES = 4 << 30
"""Limit for all executables together; the least recently used are deleted first."""

_log = logging.getLogger("jaxinfer.compiled")

_LENGTH = struct.Struct("<Q")


class NotKeptError(ValueError):
    """An executable that cannot be kept; the message says why."""


class ExecutableStore:
    """Executables on disk by their keys (`disk_cache/keys.py`). Those in use are shared: each is in memory once.

    Any failure here costs time, not correctness: the program is compiled.

    Args:
      folder: the folder of the files.

    Attributes:
      not_kept: the programs that are compiled in every process, and why.
    """

    def __init__(self, folder: Path):
        self.files = KeptFiles(folder, max_bytes=MAX_BYTES)
        self.not_kept: dict[str, str] = {}
        self._in_use: weakref.WeakValueDictionary[str, jax.stages.Compiled] = weakref.WeakValueDictionary()

    def load(
        self, key: dict[str, Any], arguments: tuple[Any, ...], donate: Sequence[int], mesh: Mesh | None
    ) -> jax.stages.Compiled | None:
        """Load the executable with this key; None without one. arguments, donate, mesh: as it was compiled for."""
        name = keys.digest(key)
        if (executable := self._in_use.get(name)) is not None:
            return executable
        content = self.files.get(name)
        if content is None:
            return None
        try:
            (length,) = _LENGTH.unpack_from(content)
            start = _LENGTH.size + length
            executable = _load(json.loads(content[_LENGTH.size : start]), content[start:], arguments, donate, mesh)
        except Exception as error:  # XLA's, JAX's or ours: whatever cannot be loaded is compiled
            self.files.remove(name)
            _log.info("%s is compiled anew, since what was kept of it cannot be loaded: %s", key["program"], error)
            return None
        return self._in_use.setdefault(name, executable)

    def save(self, key: dict[str, Any], executable: jax.stages.Compiled) -> None:
        """Keep an executable."""
        try:
            keys.check_not_replaced()
            header, payload = _describe(executable)
        except (NotKeptError, keys.NoKeyError) as error:
            return self.refuse(key["program"], str(error))
        except Exception as error:  # JAX's and jaxlib's
            return self.refuse(key["program"], f"JAX cannot serialise it, as with oneDNN's products ({error})")
        text, name = json.dumps({"key": key, **header}).encode(), keys.digest(key)
        self._in_use[name] = executable
        self.files.put(name, _LENGTH.pack(len(text)) + text + payload)

    def refuse(self, program: str, reason: str) -> None:
        """Note that a program is not kept."""
        if self.not_kept.setdefault(program, reason) is reason:
            _log.info("%s is compiled in every process: %s", program, reason)


@functools.cache
def _store_in(folder: Path) -> ExecutableStore:
    return ExecutableStore(folder)


def executable_store() -> ExecutableStore:
    """The store in the user's cache folder, which everything in this process shares."""
    return _store_in(cache_folder() / "executables")


def _describe(executable: jax.stages.Compiled) -> tuple[dict[str, Any], bytes]:
    """Return what `_load` needs to know of an executable, and XLA's serialised part."""
    unloaded = executable._executable._unloaded_executable  # type: ignore[attr-defined]
    for name in ("unordered_effects", "ordered_effects", "keepalive", "host_callbacks", "mut"):
        if getattr(unloaded, name):
            raise NotKeptError(f"it has {name.replace('_', ' ')}")
    if executable._params.const_args:
        raise NotKeptError("it has arrays of its own, which should be arguments")
    header = {
        "name": unloaded.name,
        "devices": [device.id for device in unloaded.device_list],
        "committed": unloaded.committed,
        "used": sorted(unloaded.kept_var_idx),
        "inputs": [_describe_sharding(x) for x in unloaded.input_shardings],
        "results": _describe_tree(jax.tree.unflatten(executable.out_tree, range(executable.out_tree.num_leaves))),
        "outputs": [[list(x.shape), x.dtype.name, x.weak_type] for x in unloaded.output_avals],
        "output_shardings": [_describe_sharding(x) for x in unloaded.output_shardings],
    }
    return header, unloaded.xla_executable.serialize()


def _load(
    header: dict[str, Any], payload: bytes, arguments: tuple[Any, ...], donate: Sequence[int], mesh: Mesh | None
) -> jax.stages.Compiled:
    """Load the executable from the result of `_describe` and the arguments that it was compiled for."""
    by_id = {device.id: device for device in jax.devices()}
    devices = xla_client.DeviceList(tuple(by_id[i] for i in header["devices"]))
    sharding_of = functools.partial(_sharding, devices=by_id, mesh=mesh)
    client = devices[0].client
    loaded = client.deserialize_executable(payload, executable_devices=devices)

    all_avals = [core.typeof(x) for x in jax.tree.leaves(arguments)]
    inputs = [all_avals[i] for i in header["used"]]
    outputs = [_aval(output, mesh) for output in header["outputs"]]
    in_shardings = [sharding_of(x) for x in header["inputs"]]
    in_layouts, out_layouts = pxla._get_layouts_from_executable(
        loaded, [None] * len(inputs), [None] * len(outputs), 0, inputs, outputs
    )
    in_tree = jax.tree.structure((arguments, {}))
    executable = pxla.UnloadedMeshExecutable(
        xla_executable=loaded,
        device_list=devices,
        backend=client,
        input_avals=inputs,
        input_shardings=in_shardings,
        output_avals=outputs,
        output_shardings=[sharding_of(x) for x in header["output_shardings"]],
        committed=header["committed"],
        name=header["name"],
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(header["used"]),
        mut=None,
        xla_in_layouts=in_layouts,
        dispatch_in_layouts=pxla.get_dispatch_layouts(in_layouts, in_shardings, inputs),
        xla_out_layouts=out_layouts,
        all_args_info=pxla.AllArgsInfo(all_avals, core.DebugInfo("jit", header["name"], None, None)),
        pgle_profiler=None,
    ).load()
    counts = [jax.tree.structure(argument).num_leaves for argument in arguments]
    donated = [i in donate for i, count in enumerate(counts) for _ in range(count)]
    info = jax.tree.unflatten(in_tree, map(stages.ArgInfo, all_avals, donated))
    out_tree = jax.tree.structure(_tree(header["results"]))
    return stages.Compiled(executable, [], info, out_tree)


def _aval(described: list[Any], mesh: Mesh | None) -> core.ShapedArray:
    """The type of a result; on a mesh, whose axes are automatic, it names the mesh but no axes."""
    shape, dtype, weak_type = described
    whole = None if mesh is None else NamedSharding(mesh.abstract_mesh, PartitionSpec(*[None] * len(shape)))
    return core.ShapedArray(tuple(shape), jnp.dtype(dtype), weak_type=weak_type, sharding=whole)


# Shardings and trees as JSON.


def _describe_sharding(sharding: Sharding) -> list[Any]:
    match sharding:
        case NamedSharding():
            spec = [list(axes) if isinstance(axes, tuple) else axes for axes in sharding.spec]
            return ["mesh", spec, sharding.memory_kind]
        case SingleDeviceSharding():
            return ["device", next(iter(sharding.device_set)).id, sharding.memory_kind]
    raise NotKeptError(f"it has a {type(sharding).__name__}")


def _sharding(described: list[Any], *, devices: dict[int, Any], mesh: Mesh | None) -> Sharding:
    kind, where, memory = described
    if kind == "device":
        return SingleDeviceSharding(devices[where], memory_kind=memory)
    assert mesh is not None, "the program was compiled for a mesh"
    spec = PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in where))
    return NamedSharding(mesh, spec, memory_kind=memory)


def _describe_tree(tree: Any) -> Any:
    """Describe a tree as JSON; a record by the name of its class, so that it can be found again."""
    match tree:
        case None | int():
            return tree
        case list():
            return ["list", *map(_describe_tree, tree)]
        case dict():
            return ["dict", *([key, _describe_tree(value)] for key, value in tree.items())]
        case tuple() if type(tree) is tuple:
            return ["tuple", *map(_describe_tree, tree)]
    kind = type(tree)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in name or _record(name) is not kind:
        raise NotKeptError(f"its results have a {kind.__qualname__}")
    values = tree if isinstance(tree, tuple) else (getattr(tree, field.name) for field in dataclasses.fields(tree))
    return [name, *map(_describe_tree, values)]


def _tree(described: Any) -> Any:
    """Rebuild a tree from its description."""
    match described:
        case None | int():
            return described
        case ["list", *items]:
            return list(map(_tree, items))
        case ["tuple", *items]:
            return tuple(map(_tree, items))
        case ["dict", *items]:
            return {key: _tree(value) for key, value in items}
        case [name, *items]:
            return _record(name)(*map(_tree, items))


def _record(name: str) -> Any:
    """Find a named tuple or dataclass of our packages by `module:class`; the caller has imported its module."""
    module, _, qualname = name.partition(":")
    if module.partition(".")[0] == keys.PACKAGE:
        kind = getattr(sys.modules[module], qualname)
        if dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            return kind
    raise NotKeptError(f"its results have a {name}, which is no record of ours")
