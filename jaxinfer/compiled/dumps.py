"""Readers of the text that XLA, Mosaic and NVIDIA's tools write about a compiled module: its kernels and buffers.

Pure functions from text to data; `target.py` produces the text. The formats are internal and may change, so each reader
documents what it reads.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping

CONTROL = frozenset({"kCommandBuffer", "kWhile", "kConditional", "kSequential"})
"""Kinds of thunk that only contain other thunks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How a kernel is launched; 0 if unknown.

    Attributes:
      grid: blocks.
      cluster: blocks per cluster.
      threads: per block.
      shared_bytes: shared memory per block.
    """

    grid: int = 0
    cluster: int = 1
    threads: int = 0
    shared_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thunk:
    """One entry of XLA's thunk sequence: a kernel, a copy, a library call, or a container of these (`CONTROL`).

    Attributes:
      id: unique in the module.
      kind: XLA's name of the kind ("kCustomKernel").
      parents: ids of the containers, outermost first.
      kernel: its name; one that XLA reuses for several identical instructions has the name of the first.
      launch: of the kernel.
    """

    id: int
    kind: str
    parents: tuple[int, ...]
    kernel: str = ""
    launch: Launch = Launch()


_THUNK = re.compile(r"^(?P<indent> *)(?P<id>\d+): (?P<kind>k\w+)\s*\[[^\]]*\]\s*(?P<rest>.*)$")
_LAUNCH = re.compile(r"(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)")


def _launch(*sizes: str) -> Launch:
    x, y, z, threads_x, threads_y, threads_z, shared_bytes = (int(size) for size in sizes)
    return Launch(grid=x * y * z, threads=threads_x * threads_y * threads_z, shared_bytes=shared_bytes)


def read_thunks(text: str) -> list[Thunk]:
    """The thunks of `*.thunk_sequence_after_thunk_passes.txt`, in the order written.

    A line is `003: kCustomKernel [prev=002 (1) | sink] NAME grid: [..] threads: [..]  shared_memory: 0 bytes`;
    the contents of a container follow it, indented. Raises ValueError if there are no thunks.
    """
    thunks: list[Thunk] = []
    containers: list[tuple[int, int]] = []  # indent and id of the thunks that may contain the next one
    for line in text.splitlines():
        if not (match := _THUNK.match(line)):
            continue  # "body:", "true_branch:", "No thunks."
        indent = len(match["indent"])
        containers = [(at, container) for at, container in containers if at < indent]
        launch = _LAUNCH.search(match["rest"])
        thunk = Thunk(
            id=int(match["id"]),
            kind=match["kind"],
            parents=tuple(container for _, container in containers),
            kernel=launch[1] if launch else "",
            launch=_launch(*launch.groups()[1:]) if launch else Launch(),
        )
        thunks.append(thunk)
        containers.append((indent, thunk.id))
    if not thunks:
        raise ValueError("No thunk found in XLA's thunk sequence: its format has changed; see read_thunks.")
    return thunks


def read_thunk_names(text: str) -> dict[int, str]:
    """Thunk id -> the instruction it runs, from `*.thunk_metadata.txt` (id 0 is not written)."""
    names = re.findall(r'profile_annotation: "([^"]*)"\s+(?:thunk_id: (\d+))?', text)
    return {int(number or 0): name for name, number in names}


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*)$")


def read_op_names(hlo: str) -> dict[str, str]:
    """Instruction -> the part of the model that it belongs to ("jit(step)/layers.3/attention/dot_general").

    XLA drops the name of a product that it splits along K; such an instruction gets that of a user of its result.
    """
    names: dict[str, str] = {}
    of_user: dict[str, str] = {}
    for line in reversed(hlo.splitlines()):  # users come after what they use
        if not (match := _INSTRUCTION.match(line)):
            continue
        given = re.search(r'op_name="([^"]*)"', line)
        names[match[1]] = given[1] if given else of_user.get(match[1], "")
        for operand in re.findall(r"%([\w.-]+)", match[2].split(", metadata=", 1)[0]):
            of_user[operand] = names[match[1]]
    return names


def read_aliases(hlo: str) -> int:
    """The number of results written into a donated argument, from the first line of the optimised module."""
    return len(re.findall(r"\{[\d, ]*\}: \(\d+, ", hlo.split("\n", 1)[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A value in the workspace while the program runs; several share memory at different times."""

    name: str
    shape: str
    bytes: int


_VALUE = re.compile(
    r"^ value: <\d+ (\S+) @\d+> \(size=(\d+),offset=\d+\): ([^{\s(]+)"
)  # not tuples, which are tables of pointers


def read_temporaries(text: str) -> list[Buffer]:
    """The values in temporary allocations of `*-buffer-assignment.txt`, largest first."""
    temporaries, inside = [], False
    for line in text.splitlines():
        if line.startswith("allocation "):
            inside = "-temp" in line
        elif inside and (match := _VALUE.match(line)):
            temporaries.append(Buffer(name=match[1], bytes=int(match[2]), shape=match[3]))
    return sorted(temporaries, key=lambda buffer: -buffer.bytes)


def read_mosaic_dumps(hlo: str) -> dict[str, str]:
    """Instruction -> the name of its Mosaic kernel's dumps, "NAME_7", where NAME is the `kernel_name`.

    The optimised module has each kernel as MLIR bytecode, which contains strings verbatim, each after a zero byte: the
    function's name, "NAME_mosaic_gpu", and this one. Raises ValueError if a kernel has none.
    """
    names = {}
    for line in hlo.splitlines():
        if 'custom_call_target="mosaic_gpu' in line and (match := _INSTRUCTION.match(line)):
            function = re.search(r"\\00(?!stable_)(\w+)_mosaic_gpu\\00", line)  # "stable_mosaic_gpu" is a dialect
            dumps = re.search(rf"\\00({function[1]}_\d+)\\00", line) if function else None
            if dumps is None:
                raise ValueError(f"No name in Mosaic kernel {match[1]}: its format has changed; see read_mosaic_dumps.")
            names[match[1]] = dumps[1]
    return names


def read_mosaic_launch(text: str) -> Launch:
    """A kernel's launch, from `NAME_7.mlir-passes.log`, which has its module before and after every pass.

    The line is `gpu.launch async [..] blocks(..) in (%arg8 = %c128, %arg9 = %c1, ..) threads(..) in (..)
    dynamic_shared_memory_size %c74824_i32 {`, with `clusters(..) in (..)` before the blocks if there are any. Raises
    ValueError if there is no launch.
    """
    before, _, launch = text.partition(" gpu.launch ")
    launch = launch.split("\n", 1)[0]
    constants = {name: int(value) for name, value in re.findall(r"(%\S+) = arith\.constant (\d+) : i", before)}
    shared = re.search(r"dynamic_shared_memory_size (%\w+)", launch)
    sizes = {
        name: math.prod(constants[size] for size in re.findall(r"= (%\w+)", values))
        for name, values in re.findall(r"(\w+)\([^)]*\) in \(([^)]*)", launch)
    }
    if shared is None or not {"blocks", "threads"} <= sizes.keys():
        raise ValueError("No launch found in Mosaic's module: its format has changed; see read_mosaic_launch.")
    return Launch(
        grid=sizes["blocks"],
        cluster=sizes.get("clusters", 1),
        threads=sizes["threads"],
        shared_bytes=constants[shared[1]],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What a kernel needs per thread, and its instructions.

    Attributes:
      registers: per thread.
      spill_bytes: of registers spilled to memory per thread, stores and loads.
      instructions: how often each SASS instruction occurs in the kernel ("LDG.E.128": 8).
    """

    registers: int
    spill_bytes: int
    instructions: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """Those of `FEATURES` whose instructions occur in the kernel."""
        return tuple(
            feature
            for feature, pattern in FEATURES.items()
            if any(re.match(pattern, instruction) for instruction in self.instructions)
        )


FEATURES: Mapping[str, str] = {
    "UTMALDG": r"UTMALDG\b",  # TMA: a tile from global to shared memory
    "UTMASTG": r"UTMASTG\b",  # TMA: a tile from shared to global memory
    "UBLKCP": r"UBLKCP\b",  # contiguous bytes from global to shared memory
    "LDG.128": r"LDG?\..*\b128\b",  # 16 bytes per thread from global memory to registers
    "LDGSTS.128": r"LDGSTS\..*\b128\b",  # 16 bytes per thread from global to shared memory
    "LDSM": r"LDSM\b",  # ldmatrix
    "HMMA": r"HMMA\b",  # mma.sync in bfloat16 or float16
    "IMMA": r"IMMA\b",  # mma.sync in int8
    "QMMA": r"QMMA\b",  # mma.sync in float8
    "HGMMA": r"HGMMA\b",  # wgmma in bfloat16 or float16
    "IGMMA": r"IGMMA\b",  # wgmma in int8
    "QGMMA": r"QGMMA\b",  # wgmma in float8
    "LDL": r"LDL\b",  # from local memory: spills, or an array indexed at run time
    "STL": r"STL\b",
}
"""Feature -> regular expression of the SASS instructions that show how a kernel moves and multiplies data."""


def read_resources(text: str) -> dict[str, Resources]:
    """Kernel -> its resources without instructions, from the output of `ptxas -v`."""
    found = {}
    for block in text.split("Compiling entry function '")[1:]:
        stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", block)[:2]
        registers = re.search(r"Used (\d+) registers", block)
        assert registers is not None, block
        name = block.split("'", 1)[0]
        found[name] = Resources(registers=int(registers[1]), spill_bytes=int(stores) + int(loads))
    return found


_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def read_instructions(text: str) -> dict[str, Mapping[str, int]]:
    """Kernel -> how often each instruction occurs in it, from the output of `nvdisasm`."""
    sections = re.split(r"^//-+ \.text\.(\S+) +-+$", text, flags=re.MULTILINE)[1:]
    return {name: Counter(_SASS.findall(code)) for name, code in zip(sections[::2], sections[1::2], strict=True)}
