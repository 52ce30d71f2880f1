"""Keys of compiled programs, which name all they depend on: two programs with equal keys have the same executable.

A key is made of plain values (JSON), part by part, so that a person can see why two differ.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
from jax._src import config, core  # there is no public way to ask for the context of a trace
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxinfer.disk_cache.processor import cpu_fields, cpu_model, usable_cores
from jaxinfer.pallas_kernels import target

PACKAGE = "jaxinfer"
"""The code that programs are traced from. Every file of it is part of every key."""
LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "einops", "ml-dtypes")
"""The libraries that decide what is traced and compiled."""
_ENVIRONMENT = ("XLA_", "TF_XLA_", "NVIDIA_TF32_OVERRIDE", "NPROC", "OMP_NUM_THREADS")
"""Variables that XLA and its libraries read begin with these; JAX's own are in its config."""
_GPU = ("compute_capability", "core_count", "shared_memory_per_block_optin")
"""Properties of a GPU that kernels depend on."""
_NOT_COMPILED = ("jax_compilation_cache_", "jax_persistent_cache_", "jax_log", "jax_debug_log", "jax_explain_")
"""Options of JAX that begin with these say what is kept and what is printed, not what is compiled."""

_IMPORTED = ("crc32c", "filelock", "huggingface_hub", "jinja2", "llguidance", "matplotlib", "msgspec", "optax", "orbax")
_IMPORTED += ("PIL", "platformdirs", "rich", "safetensors", "tensorstore", "tokenizers", "typer")
"""Other packages that our modules import, whose functions may therefore stand in our modules."""


def _process_start() -> float:
    """Return when this process started, in seconds since 1970; now, if the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return time.time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


_STARTED = _process_start()


class NoKeyError(ValueError):
    """A program depends on something that has no description; the message says what."""


def digest(parts: dict[str, Any]) -> str:
    """A key as one word."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def environment_key() -> dict[str, Any]:
    """The part of a key that every program of this process depends on.

    Raises NoKeyError if its code has changed since it started, or if JAX is told to keep nothing.
    """
    if not jax.config.jax_enable_compilation_cache:
        raise NoKeyError("jax_enable_compilation_cache is off")
    return {
        **code_key(),
        **_machine(),
        "config": {name: str(v) for name, v in jax.config.values.items() if not name.startswith(_NOT_COMPILED)},
        # The context that JAX's own cache of traces depends on: the config as this thread sees it, the mesh, and the
        # contexts that any library has made, ours (kernels switched off, tile sizes on trial) among them.
        "context": [describe(value) for value in config.trace_context()],
        "interpreting": target.interpreting(),
        "environment": _environment(),
    }


def code_key() -> dict[str, Any]:
    """The part of a key that all output of our code depends on.

    Raises NoKeyError if the code has changed since the process started.
    """
    return {"code": source_digest(), "versions": _versions()}


def describe(value: Any) -> Any:
    """Describe a value as JSON, such that different values have different descriptions.

    Raises NoKeyError for anything that is not plain data: functions, since what they do is not in their names, and
    objects of classes that are neither ours nor of `LIBRARIES`, whose code is in no key.
    """
    match value:
        case None | bool():
            return value
        case int() | str() if type(value) in (int, str):
            return value
        case float() if type(value) is float:
            return ["float", value.hex()]
        case np.dtype():
            return ["dtype", *_describe_dtype(value)]
        case np.ndarray() | np.generic():
            content = np.ascontiguousarray(value).tobytes()
            return ["numpy", *_describe_dtype(value.dtype), list(value.shape), hashlib.sha256(content).hexdigest()]
        case enum.Enum():
            return [_describe_class(type(value)), value.name]
        case frozenset() | set() if type(value) in (frozenset, set):
            return ["set", *sorted((describe(item) for item in value), key=json.dumps)]
        case list() | tuple():
            kind = type(value)
            name = kind.__name__ if kind in (list, tuple) else _describe_class(kind)
            return [name, *(describe(item) for item in value)]
        case dict() if type(value) is dict:
            return ["dict", *sorted(([describe(k), describe(v)] for k, v in value.items()), key=json.dumps)]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return [_describe_class(type(value)), fields]
        case jax.Device():
            return ["device", value.platform, value.id]
        case core.AxisEnv():
            return ["axes", *map(describe, (dict(value.axis_sizes), value.spmd_axis_names))]
        case jax.sharding.AbstractMesh() | Mesh() | NamedSharding() | SingleDeviceSharding():
            return _describe_devices(value)
        case jax.ShapeDtypeStruct():
            return _describe_shape(value)
    raise _not_described(type(value))


def describe_tree(tree: Any) -> Any:
    """Describe a pytree of arrays, shapes or shardings: structure and leaves; an array by its shape, not its values."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    return [str(treedef), [_describe_shape(leaf) if isinstance(leaf, arrays) else describe(leaf) for leaf in leaves]]


def _describe_shape(value: Any) -> list[Any]:
    sharding = getattr(value, "sharding", None)
    where = None if sharding is None else describe(sharding)
    return ["array", *_describe_dtype(value.dtype), list(value.shape), bool(getattr(value, "weak_type", False)), where]


def _describe_dtype(dtype: np.dtype) -> list[str]:
    """The name, which tells bfloat16 from other types of two bytes, and the byte order, which it lacks."""
    if dtype.hasobject or dtype.names or dtype.subdtype or dtype.metadata:
        raise NoKeyError(f"it depends on an array of {dtype!r}")
    return [dtype.name, dtype.str]


def _describe_class(kind: type) -> str:
    """Return a class's name, which with the source or version of its package identifies it."""
    if kind.__module__.partition(".")[0] not in (PACKAGE, *LIBRARIES) or "<locals>" in kind.__qualname__:
        raise _not_described(kind)
    return f"{kind.__module__}.{kind.__qualname__}"


def _not_described(kind: type) -> NoKeyError:
    return NoKeyError(f"it depends on a {kind.__module__}.{kind.__qualname__}")


def describe_function(function: Callable[..., Any]) -> str:
    """Return the name of a function of our package, which with the package's source identifies what it does.

    Raises NoKeyError for a function that its name does not identify: from elsewhere, or with values bound to it.
    """
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    if not isinstance(function, FunctionType) or name.partition(".")[0] != PACKAGE:
        raise NoKeyError(f"{name} is not a function of {PACKAGE}")
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or "<locals>" in name:
        raise NoKeyError(f"{name} has values of its own; what a program depends on belongs into ProgramSpec.static")
    return name


def check_not_replaced() -> None:
    """Raise NoKeyError if a function of our package was replaced by another, as tests and debuggers do.

    This takes some ten milliseconds, so it is checked before a program is kept, not before one is read: a patched
    process may run what was kept without the patch, but never hands its own programs on to others.
    """
    for name, function in _functions():
        package = function.__globals__.get("__name__", "").partition(".")[0]
        known = package in (PACKAGE, *LIBRARIES, *_IMPORTED) or package in sys.stdlib_module_names
        if not known and not package.startswith("namedtuple_"):  # generated by `collections`
            raise NoKeyError(f"{name} was replaced by a function of {package or 'unknown origin'}")


def _functions() -> Iterator[tuple[str, FunctionType]]:
    """Yield every function in our package's modules and classes, by name."""
    modules = list(sys.modules.items())  # other threads may import
    for module in [module for name, module in modules if name.partition(".")[0] == PACKAGE]:
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleType):  # one that stands for another would import it if it was asked
                continue
            candidates = [(name, value)]
            if isinstance(value, type) and value.__module__ == module.__name__:
                candidates = [(f"{name}.{attribute}", method) for attribute, method in list(vars(value).items())]
            for where, function in candidates:
                function = getattr(function, "__func__", function)
                if hasattr(function, "__wrapped__"):  # of few, and `unwrap` takes as long as all else here
                    function = inspect.unwrap(function)
                if isinstance(function, FunctionType):
                    yield f"{module.__name__}.{where}", function


def _describe_devices(value: Any) -> Any:
    match value:
        case jax.sharding.AbstractMesh():
            kinds = [kind.name for kind in value.axis_types]
            return ["mesh", list(value.axis_names), list(value.axis_sizes), kinds, str(value.abstract_device)]
        case Mesh():
            return [*_describe_devices(value.abstract_mesh), [device.id for device in value.devices.flat]]
        case NamedSharding():
            return ["named", _describe_devices(value.mesh), str(value.spec), value.memory_kind]
        case SingleDeviceSharding():
            return ["device", *sorted(device.id for device in value.device_set), value.memory_kind]


@functools.cache
def source_digest() -> str:
    """A digest of every file of our package. Raises NoKeyError if one changed after this process started.

    The process runs what it imported, so later files on disk do not describe it. The time of a change is the ctime:
    programs that copy files set the mtime as they like.
    """
    digest = hashlib.sha256()
    for path, name in sorted(_source_files(), key=lambda file: file[1]):
        if path.stat().st_ctime > _STARTED:
            raise NoKeyError(f"{path} has changed since this process started")
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _source_files() -> Iterator[tuple[Path, str]]:
    """Yield every file of our package, and its name in it. In a checkout some of its folders are links."""
    for package in importlib.import_module(PACKAGE).__path__:
        for folder, folders, names in os.walk(package, followlinks=True):
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from ((path, str(path.relative_to(package))) for path in (Path(folder, name) for name in names))


@functools.cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LIBRARIES} | {"python": sys.version}


@functools.cache
def _machine() -> dict[str, Any]:
    """Describe the devices and the processor, which do not change while the process runs."""
    device = jax.devices()[0]
    return {
        "devices": [
            [device.platform, device.device_kind],
            [str(getattr(device, name, "")) for name in _GPU],
            [device.id for device in jax.devices()],
            device.client.platform_version,
        ],
        # XLA compiles for the processor's instructions and divides loops by the number of cores.
        "processor": [platform.machine(), _cpu_features(), usable_cores()],
    }


def _cpu_features() -> list[str]:
    """The processor's model and instruction sets."""
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return [cpu_model(), *(cpu_fields().get(name, "") for name in names)]


def _environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    if "xla_dump" in variables.get("XLA_FLAGS", ""):
        raise NoKeyError("XLA_FLAGS asks for dumps, which only compiling writes")
    return variables
