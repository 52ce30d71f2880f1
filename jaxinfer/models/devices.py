"""The devices a model runs on: which they are, what depends on their platform, and how much memory they have.

Everything that the models decide by platform is decided here.
"""

import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding, SingleDeviceSharding
from rich.filesize import decimal

from jaxinfer.checkpoints import Leaf
from jaxinfer.disk_cache.processor import cpu_model, usable_cores
from jaxinfer.pallas_kernels.target import gpu_or_none
from jaxinfer.sharding import MeshConfig, MeshFile, ShardingRules, check_mesh, check_rules, read_mesh

AnyMesh = Mesh | MeshConfig | MeshFile | str | os.PathLike[str] | None
"""How a user says which devices: a mesh, its config, or a TOML file, read or by its path; None: the first device."""


BYTES_AT_ONCE = 3 << 20
"""The bytes of tokens that a CPU takes together: the activations of more do not fit its caches (docs/cpu-speed.md)."""


def inputs_at_once(token_bytes: int) -> int | None:
    """Return how many inputs, each with this many bytes of tokens, a program traced now takes together; None: all."""
    return None if gpu_or_none() else 1 << max((BYTES_AT_ONCE // token_bytes).bit_length() - 1, 0)


def open_mesh(mesh: AnyMesh) -> Mesh | MeshConfig | MeshFile | None:
    """Read the file of a mesh that is named by its path; return any other mesh as it is.

    Raises ValueError for something else.
    """
    if isinstance(mesh, (str, os.PathLike)):
        return read_mesh(mesh)
    if mesh is not None and not isinstance(mesh, Mesh | MeshConfig | MeshFile):
        raise ValueError(
            f"mesh must be a MeshConfig, such as MeshConfig(data=2), a jax.sharding.Mesh, or the path of a TOML file; "
            f"got {mesh!r}."
        )
    return mesh


def build_mesh(mesh: AnyMesh, rules: ShardingRules | None) -> tuple[Mesh | None, ShardingRules]:
    """Build a mesh (None: the first device, without one) and the rules for it.

    Raises:
      ValueError: rules beside a file that has some, or without a mesh, or what is not implemented: nothing that a user
        asks for does nothing.
    """
    mesh = open_mesh(mesh)
    if isinstance(mesh, MeshFile):
        if mesh.rules is not None and rules is not None:
            raise ValueError(f"{mesh.source} has a table [rules], and rules are given too: keep one of them.")
        mesh, rules = mesh.mesh, rules or mesh.rules
    rules = rules or ShardingRules()
    if mesh is None:
        if rules != ShardingRules():
            raise ValueError("rules say how a mesh splits a model, and there is no mesh: give one, or no rules.")
        return None, rules
    check_rules(rules)
    mesh = mesh.build() if isinstance(mesh, MeshConfig) else mesh
    check_mesh(mesh)
    return mesh, rules


def devices_of(mesh: Mesh | None) -> list[Any]:  # jax.Device has no static type
    """The devices of a mesh; without one, this process's first device."""
    return jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)


_launching = threading.Lock()


def is_divided(mesh: Mesh | None) -> bool:
    """Return whether programs run on several devices."""
    return mesh is not None and mesh.size > 1


def can_overlap(mesh: Mesh | None) -> bool:
    """Return whether a program may be sent while another one runs."""
    # Virtual devices on a CPU deadlock when the collectives of two programs are in flight.
    return not is_divided(mesh) or devices_of(mesh)[0].platform != "cpu"


def run_on[Result](mesh: Mesh | None, program: Callable[..., Result], *arguments: Any) -> Result:
    """Call a program, from any thread. Wait for its turn and its results where two must not run at once."""
    if not is_divided(mesh):
        return program(*arguments)
    with _launching:  # programs must begin in the same order on all devices, or their collectives wait for ever
        result = program(*arguments)
        return result if can_overlap(mesh) else jax.block_until_ready(result)


def host_device() -> Any:
    """The CPU of this machine, whatever the other devices are. Raises RuntimeError if JAX may not use it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "JAX cannot use the CPU, which converts weights: unset JAX_PLATFORMS, or add the CPU, as in "
            "JAX_PLATFORMS=cuda,cpu."
        ) from error


def device_name(device: Any) -> str:
    """A device's kind; of a CPU, which JAX calls just "cpu", its model and the cores that XLA uses."""
    if device.platform != "cpu":
        return device.device_kind
    cores = min(usable_cores(), int(os.environ.get("NPROC") or usable_cores()))  # XLA has at most NPROC threads
    return f"{cpu_model()}, {cores} core{'' if cores == 1 else 's'}"


def sharding_on(mesh: Mesh | None, rules: ShardingRules, axes: Sequence[str | None], shape: Sequence[int]) -> Sharding:
    """Return where an array with these logical axes lives."""
    if mesh is None:
        return SingleDeviceSharding(devices_of(mesh)[0])
    return rules.sharding(mesh, axes, shape)


def fetch_sharding_on(
    mesh: Mesh | None, rules: ShardingRules, axes: Sequence[str | None], shape: Sequence[int]
) -> Sharding:
    """Return where a weight with these logical axes comes to the devices, layer by layer."""
    if mesh is None:
        return sharding_on(mesh, rules, axes, shape)
    return rules.fetch_sharding(mesh, axes, shape)


def placed_leaf(
    leaf: Leaf, mesh: Mesh | AbstractMesh | None, rules: ShardingRules, *, staged: bool = False
) -> jax.ShapeDtypeStruct:
    """A leaf as programs take it. staged: whether it is one of each stage, put one after the other."""
    shape, dtype = leaf.shape, np.dtype(leaf.dtype)
    if mesh is None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_on(None, rules, leaf.axes, shape))
    if staged:
        shape = (rules.num_stages(mesh) * shape[0], *shape[1:])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(mesh, leaf.axes, shape, staged=staged))


def mesh_of_stage(mesh: Mesh, stage: int) -> Mesh:
    """The part of a mesh that one stage of a pipeline has."""
    devices = mesh.devices.take([stage], axis=mesh.axis_names.index("pipeline"))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def default_dtype(mesh: Mesh | None) -> str | None:
    """The dtype to compute in if none is asked for; None: as stored."""
    if devices_of(mesh)[0].platform == "cpu":
        return "float32"  # a CPU would convert halves back and forth
    return None


def bytes_per_device(leaves: Mapping[str, Leaf], mesh: Mesh | AbstractMesh | None, rules: ShardingRules) -> int:
    """The bytes that each device stores of these leaves."""
    total = 0
    for leaf in leaves.values():
        shape = leaf.shape if mesh is None else rules.sharding(mesh, leaf.axes, leaf.shape).shard_shape(leaf.shape)
        total += math.prod(shape) * np.dtype(leaf.dtype).itemsize
    return total


def check_memory(folder: pathlib.Path, needed: int, mesh: Mesh | None, remedy: str) -> None:
    """Raise MemoryError with a remedy unless each device has this many bytes free for the model in `folder`."""
    if needed > (available := available_bytes(mesh)):
        raise MemoryError(
            f"{folder}: loading needs {decimal(needed)} of memory and {decimal(available)} are available; {remedy}."
        )


def available_bytes(mesh: Mesh | None = None) -> int:
    """The bytes that are free for arrays on each device; CPU devices share the host's."""
    devices = devices_of(mesh)
    free = device_available_bytes(devices[0])
    return free // len(devices) if devices[0].platform == "cpu" else free


def device_available_bytes(device: Any) -> int:
    """The bytes that are free on a device; a CPU has the host's. Raises RuntimeError if the device does not say."""
    if device.platform == "cpu":
        return host_available_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise RuntimeError(
            f"{device.platform}:{device.id} does not say how much memory it has, as with "
            "XLA_PYTHON_CLIENT_ALLOCATOR=platform: unset that variable."
        )
    return stats["bytes_limit"] - stats["bytes_in_use"]


def device_total_bytes(device: Any) -> int | None:
    """The bytes that a device has for arrays, free or not; a CPU has the host's. None: not known."""
    if device.platform == "cpu":
        return host_total_bytes()
    return (device.memory_stats() or {}).get("bytes_limit")


def host_available_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """The bytes that the machine has free, or that this process's container may still take if that is less."""
    available = _meminfo(root, "MemAvailable")
    return min([available, *(free for group in _containers(root) if (free := group.free) is not None)])


def host_total_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """The bytes that the machine has, or that this process's container may take in all if that is less."""
    total = _meminfo(root, "MemTotal")
    return min([total, *(limit for group in _containers(root) if (limit := group.limit) is not None)])


def _meminfo(root: pathlib.Path, field: str) -> int:
    """Read a number of bytes that Linux says of all memory; macOS says only the total."""
    if not (meminfo := root / "proc/meminfo").exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


class _ControlGroup(NamedTuple):
    """A cgroup, and the names of its files: of the limit and of what is used, and in `memory.stat` of files' pages."""

    folder: pathlib.Path
    limit_file: str
    usage_file: str
    cached: str

    @property
    def limit(self) -> int | None:
        """Bytes that it may take in all; None: it has no limit, or is not mounted here, or without this controller."""
        try:
            return int((self.folder / self.limit_file).read_text())
        except (OSError, ValueError):  # "max"
            return None

    @property
    def free(self) -> int | None:
        """Bytes that it may still take, if it has a limit; pages of files do not count, as the kernel can drop them."""
        if (limit := self.limit) is None:
            return None
        try:
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            return limit - int((self.folder / self.usage_file).read_text()) + int(stat[self.cached])
        except (OSError, KeyError, ValueError):
            return None


def _containers(root: pathlib.Path) -> Iterator[_ControlGroup]:
    """Yield the containers around this process: cgroups of version 2 or 1, up to the outermost."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = [["0", "", "/"]]
    top = root / "sys/fs/cgroup"
    for number, controllers, path in groups:
        if number == "0":
            folder, files = top, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder, files = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inside = pathlib.PurePosixPath(path.lstrip("/"))
        for group in {folder, folder / inside, *(folder / parent for parent in inside.parents)}:
            yield _ControlGroup(group, *files)
