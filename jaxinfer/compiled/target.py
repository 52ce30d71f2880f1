"""Compilation for a GPU that is not here, and a report of what it would run: kernels, CUDA graphs, memory.

XLA needs no device to compile for one, only its description (`targets/`; `docs/ahead-of-time.md` explains how to add
one). Nothing is timed and no kernel is autotuned. The report lists the kernels, which of them are in a CUDA graph, and
the buffers; on request also each kernel's registers, spills and instructions. Start at `compile_for`.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core, utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.compiled.dumps import (
    CONTROL,
    Buffer,
    Collective,
    Resources,
    Thunk,
    read_aliases,
    read_collectives,
    read_instructions,
    read_mosaic_calls,
    read_op_names,
    read_predicates,
    read_resources,
    read_temporaries,
    read_thunk_names,
    read_thunks,
)
from jaxinfer.compiled.program import Sizes
from jaxinfer.compiled.spec import ProgramSpec
from jaxinfer.extras import CUDA_COMPILER, MissingExtraError
from jaxinfer.pallas_kernels.dispatch import kernels_available
from jaxinfer.pallas_kernels.target import GPU, targeting
from jaxinfer.sharding import MeshConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of GPU to compile for.

    Attributes:
      name: as users give it ("h200").
      description: XLA's `GpuTargetConfigProto` as text.
    """

    name: str
    description: str

    @staticmethod
    def names() -> list[str]:
        """The names of the targets that come with jaxinfer."""
        folder = resources.files("jaxinfer.compiled") / "targets"
        return sorted(file.name.removesuffix(".txtpb") for file in folder.iterdir() if file.name.endswith(".txtpb"))

    @classmethod
    def load(cls, name: str) -> "Target":
        """Load a target by name."""
        if name not in cls.names():
            raise ValueError(f"Unknown target {name!r}; known: {', '.join(cls.names())}.")
        return cls(name=name, description=(resources.files("jaxinfer.compiled") / f"targets/{name}.txtpb").read_text())

    @property
    def gpu(self) -> GPU:
        """The properties of the GPU that kernels ask for."""
        major, minor = self._fields(r"cuda_compute_capability \{\s*major: (\d+)(?:\s+minor: (\d+))?")  # no minor: 0
        return GPU(
            name=self._fields(r'device_description_str: "(.*)"')[0],
            capability=(int(major), int(minor or 0)),
            sms=int(self._fields(r"\bcore_count: (\d+)")[0]),
            shared_bytes=int(self._fields(r"\bshared_memory_per_block_optin: (\d+)")[0]),
        )

    def _fields(self, pattern: str) -> tuple[str, ...]:
        if match := re.search(pattern, self.description):
            return match.groups()
        raise ValueError(f"The description of target {self.name!r} has nothing like {pattern}")

    def mesh(self, config: MeshConfig | None = None) -> jax.sharding.Mesh:
        """Build a mesh of one process's devices to compile for; nothing runs on it. Raises MissingExtraError.

        config: None: one device.
        """
        require_compiler()
        config = config or MeshConfig()
        # slices x processes per slice x devices per process
        described = topologies.get_topology_desc(
            platform="cuda", target_config=self.description, topology=f"1x1x{config.size}"
        )
        return config.build(described.devices)


def find_tool(name: str) -> Path | None:
    """Find one of NVIDIA's tools, such as ptxas: in the Python packages, PATH or /usr/local/cuda, in this order."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    candidates = [Path(root) / package / "bin" / name for root in roots for package in ("cu13", "cuda_nvcc")]
    if path := shutil.which(name):
        candidates.append(Path(path))
    candidates.append(Path("/usr/local/cuda/bin") / name)
    return next((path for path in candidates if path.exists()), None)


def require_compiler() -> None:
    """Raise MissingExtraError if this machine cannot compile for an NVIDIA GPU."""
    plugin = importlib.util.find_spec("jax_plugins") and any(
        importlib.util.find_spec(f"jax_plugins.{name}") for name in ("xla_cuda13", "xla_cuda12")
    )
    if not plugin:
        raise _missing("XLA's CUDA compiler (jax-cuda13-plugin)")
    _require_tool("ptxas")


def _require_tool(name: str) -> Path:
    path = find_tool(name)
    if path is None:
        raise _missing(name)
    return path


def _missing(what: str) -> MissingExtraError:
    return MissingExtraError("compiling for a GPU", what, "aot", CUDA_COMPILER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch (a kernel, a copy or a library call) of a compiled program.

    Attributes:
      name: a Mosaic kernel's `kernel_name`; otherwise the instruction's name.
      instruction: the HLO instruction it runs.
      scope: the part of the model that its result belongs to ("layers.3/attention/dot_general").
      kind: XLA's kind of thunk, or "mosaic".
      grid: blocks; 0 if unknown, as for a copy or a library call.
      threads: threads per block; 0 if unknown.
      shared_bytes: shared memory per block declared at launch; 0 if unknown.
      in_graph: whether it is launched by a CUDA graph rather than by the host.
      in_loop: whether it is launched in every turn of a loop.
      condition: the innermost `lax.cond` that must hold for it to run, or `lax.switch` that must choose another than
        its first branch, by its place in the model; empty if there is none, and the kernel runs while nothing holds.
      cluster: blocks that run together and can access each other's shared memory.
      resources: registers, spills and instructions, if requested.
    """

    name: str
    instruction: str
    scope: str
    kind: str
    grid: int
    threads: int
    shared_bytes: int
    in_graph: bool
    in_loop: bool
    condition: str
    cluster: int = 1
    resources: Resources | None = None

    @property
    def layer(self) -> int | None:
        """The index of the model's layer, or None outside the layers."""
        match = re.search(r"\blayers\.(\d+)", self.scope)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetReport:
    """The launches, memory and exchanges of a program on a target, per device.

    Attributes:
      target: the target's name.
      kernels: every launch, in order; the launches in a loop or branch are listed once.
      graphs: CUDA graphs that the host launches.
      host_launches: kinds of thunk that the host launches besides; ideally empty.
      argument_bytes: weights, caches and inputs.
      output_bytes: results.
      alias_bytes: results that are written in place.
      temp_bytes: workspace.
      temporaries: the values that share the workspace, largest first.
      collectives: the arrays that devices exchange.
      donated: arrays that may be overwritten.
      aliased: results that are written into a donated array.
      compile_seconds: seconds of lowering and compiling.
    """

    target: str
    kernels: tuple[Kernel, ...]
    graphs: int
    host_launches: tuple[str, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    temporaries: tuple[Buffer, ...]
    collectives: tuple[Collective, ...]
    donated: int
    aliased: int
    compile_seconds: float

    def of_layer(self, layer: int | None) -> tuple[Kernel, ...]:
        """The kernels of one layer, or with None those outside. Layer 0 includes what all layers share."""
        return tuple(kernel for kernel in self.kernels if kernel.layer == layer)

    def outside_layers(self) -> tuple[Kernel, ...]:
        """The kernels of no layer, and those of layer 0 that other layers do not have: what all layers share.

        The embedding, for example, has the name of what layer 0 makes of it.
        """
        scopes = {(kernel.layer, kernel.scope.partition(f"layers.{kernel.layer}/")[2]) for kernel in self.kernels}
        repeated = {scope for layer, scope in scopes if layer or self.layers == 1}
        inside = (kernel.layer or kernel.scope.partition("layers.0/")[2] in repeated for kernel in self.kernels)
        return tuple(kernel for kernel, layer in zip(self.kernels, inside, strict=True) if not layer)

    @property
    def layers(self) -> int:
        """The number of layers that have kernels."""
        return len({kernel.layer for kernel in self.kernels} - {None})


def compile_for(
    target: Target,
    function: Callable,
    args: tuple,
    *,
    donate: tuple[int, ...] = (),
    options: Mapping[str, str | bool | int] | None = None,
    resources: bool = False,
) -> TargetReport:
    """Compile `function` for a device of a target, which need not be present, and report on it.

    Args:
      args: pytrees of arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are used, and all are replicated.
      donate: positions of the arguments that results may overwrite.
      options: XLA's compiler options, usually those of `compiler_options`.
      resources: also assemble and disassemble every kernel, to report its registers, spills and instructions (0.1 s
        each; 0.5 s and 5 MB of temporary files for a Mosaic kernel).

    Raises MissingExtraError without the extra `aot`; RuntimeError for a second compute capability that runs kernels.
    """
    mesh = target.mesh()
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), args)

    def lower() -> jax.stages.Lowered:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(function, donate_argnums=donate).lower(*shapes)

    donated = len(jax.tree.leaves([args[index] for index in donate]))
    return _compile(target, lower, donated=donated, devices=1, options=options or {}, resources=resources)


def compile_program[S: Sizes](
    target: Target,
    spec: ProgramSpec[S, Any],
    sizes: S,
    *,
    mesh: jax.sharding.Mesh | None = None,
    resources: bool = False,
) -> TargetReport:
    """Compile a program for a target, or for a mesh of it, and report on one device.

    mesh: from `target.mesh`, where the spec's arguments are; None: one device, wherever they are. The rest is as in
    `compile_for`.
    """
    args, options = spec.arguments(sizes), spec.options(sizes)
    if mesh is None:
        return compile_for(target, spec.function(sizes), args, donate=spec.donate, options=options, resources=resources)
    donated = len(jax.tree.leaves([args[index] for index in spec.donate]))
    return _compile(
        target,
        lambda: spec.lower(sizes, mesh),
        donated=donated,
        devices=mesh.size,
        options=options,
        resources=resources,
    )


def _compile(
    target: Target,
    lower: Callable[[], jax.stages.Lowered],
    *,
    donated: int,
    devices: int,
    options: Mapping[str, str | bool | int],
    resources: bool,
) -> TargetReport:
    with tempfile.TemporaryDirectory(prefix="jaxinfer-dump-") as folder, _uncached():
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        mosaic_folder = Path(folder) / "mosaic"
        mosaic_folder.mkdir()
        if resources:
            dump["xla_dump_emitter_re"] = "ptx"
        start = time.perf_counter()
        with _mosaic_dumps(mosaic_folder) if resources else contextlib.nullcontext():
            with targeting(target.gpu), _mosaic_for(target.gpu):
                lowered = lower()
            executable = lowered.compile(compiler_options=dict(options) | dump)
        seconds = time.perf_counter() - start
        files = list(Path(folder).iterdir())
        usage = _disassemble([*Path(folder).glob("*.ptx"), *mosaic_folder.glob("*.ptx")])
        thunks = read_thunks(_text(files, "thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt"))
        names = read_thunk_names(_text(files, "thunk_metadata.txt"))
        temporaries = read_temporaries(_text(files, "-buffer-assignment.txt"))
    hlo, memory = executable.as_text(), executable.memory_analysis()
    assert hlo is not None  # XLA:GPU provides both
    assert memory is not None
    graphs = {thunk.id for thunk in thunks if thunk.kind == "kCommandBuffer" and not thunk.parents}
    return TargetReport(
        target=target.name,
        kernels=_kernels(thunks, names, hlo, usage, graphs),
        graphs=len(graphs),
        host_launches=tuple(t.kind for t in thunks if graphs.isdisjoint((t.id, *t.parents))),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        temporaries=tuple(temporaries),
        collectives=tuple(read_collectives(hlo, devices)),
        donated=donated,
        aliased=read_aliases(hlo),
        compile_seconds=seconds,
    )


def _kernels(
    thunks: list[Thunk], names: dict[int, str], hlo: str, usage: dict[str, Resources], graphs: set[int]
) -> tuple[Kernel, ...]:
    scopes, mosaic = read_op_names(hlo), read_mosaic_calls(hlo)
    conditions, loops = _conditions(thunks, names, hlo), {thunk.id for thunk in thunks if thunk.kind == "kWhile"}

    def scope(instruction: str) -> str:
        return scopes.get(instruction, "").split("/", 1)[-1]  # without "jit(function)/"

    kernels = []
    for thunk in thunks:
        if thunk.kind in CONTROL:
            continue
        instruction = names.get(thunk.id, thunk.kernel)
        call = mosaic.get(instruction)
        launch = call.launch if call else thunk.launch
        kernels.append(
            Kernel(
                name=call.dump.rpartition("_")[0] if call else instruction,
                instruction=instruction,
                scope=scope(instruction),
                kind="mosaic" if call else thunk.kind,
                grid=launch.grid,
                threads=launch.threads,
                shared_bytes=launch.shared_bytes,
                cluster=launch.cluster,
                in_graph=not graphs.isdisjoint(thunk.parents),
                in_loop=not loops.isdisjoint(thunk.parents),
                condition=scope(conditions[thunk.id]),
                resources=usage.get(call.dump if call else thunk.kernel),
            )
        )
    return tuple(kernels)


def _conditions(thunks: list[Thunk], names: dict[int, str], hlo: str) -> dict[int, str]:
    """Map each thunk to the innermost conditional that has it outside its branch for false or 0; to "" without one."""
    predicates = read_predicates(hlo)
    otherwise = {  # conditional -> the branch it takes while its condition does not hold
        thunk.id: int(names[thunk.id] in predicates) for thunk in thunks if thunk.kind == "kConditional"
    }

    def condition(thunk: Thunk) -> str:
        inside = reversed(list(zip(thunk.parents, thunk.branches, strict=True)))
        return next((names[parent] for parent, branch in inside if otherwise.get(parent, branch) != branch), "")

    return {thunk.id: condition(thunk) for thunk in thunks}


def _text(files: list[Path], *endings: str) -> str:
    """Read the dump with the first of these endings that XLA wrote; some it writes only if a pass changed something."""
    for ending in endings:
        for file in files:
            if file.name.endswith(ending):
                return file.read_text()
    raise FileNotFoundError(f"XLA wrote no dump ending in {' or '.join(endings)}: its dumps have changed.")


def _disassemble(sources: list[Path]) -> dict[str, Resources]:
    """The resources of the kernels in PTX files, by kernel name; for Mosaic by file name (a kernel per file)."""
    assembler, disassembler = (_require_tool(name) if sources else None for name in ("ptxas", "nvdisasm"))

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)

    def disassemble(source: Path) -> dict[str, Resources]:
        architecture = re.search(r"^\.target (\w+)", source.read_text(), re.MULTILINE)
        assert architecture is not None, source
        binary = source.with_suffix(".cubin")
        sizes = read_resources(run(assembler, "-v", "--gpu-name", architecture[1], source, "-o", binary).stderr)
        instructions = read_instructions(run(disassembler, "-c", "-ndf", binary).stdout)
        measured = [dataclasses.replace(sizes[name], instructions=instructions[name]) for name in sizes]
        names = [source.stem] if source.parent.name == "mosaic" else sizes
        return dict(zip(names, measured, strict=True))

    usage: dict[str, Resources] = {}
    with ThreadPoolExecutor() as pool:
        for kernels in pool.map(disassemble, sources):
            usage |= kernels
    return usage


@contextlib.contextmanager
def _mosaic_dumps(folder: Path) -> Iterator[None]:
    """Let Mosaic dump every kernel that is lowered and compiled in this context."""
    name = "MOSAIC_GPU_DUMP_TO"  # read when a kernel is lowered, and stored with it until it is compiled
    before = os.environ.get(name)
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_assembled_for: list[tuple[int, int]] = []
"""The compute capabilities that Mosaic was asked for in this process."""


@contextlib.contextmanager
def _mosaic_for(gpu: GPU) -> Iterator[None]:
    """Let Mosaic lower kernels for this GPU: it takes every GPU that is not here for an H100."""
    if kernels_available():
        _assembled_for.append(gpu.capability)
        if gpu.capability != (first := _assembled_for[0]):
            raise RuntimeError(
                f"Mosaic assembles for the first compute capability of a process, here {first}: compile for "
                f"{gpu.name}, {gpu.capability}, in a process of its own."
            )
    before = utils._infer_arch
    utils._infer_arch = lambda: gpu.capability  # there is no public way to set it
    try:
        with core.artificial_shared_memory_limit(gpu.shared_bytes):
            yield
    finally:
        utils._infer_arch = before


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Bypass the persistent cache: it cannot load these executables, and a hit would write no dumps."""
    name = "jax_persistent_cache_min_compile_time_secs"  # JAX reads the cache's own switch once per process
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)
