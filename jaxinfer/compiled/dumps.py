"""Readers of the text that XLA, Mosaic and NVIDIA's tools write about a compiled module: its kernels and buffers.

Pure functions from text to data; `target.py` produces the text. The formats are internal and may change, so each reader
documents what it reads.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxinfer.sharding.planner.exchanges import wire_bytes

CONTROL = frozenset({"kCommandBuffer", "kWhile", "kConditional", "kSequential"})
"""Kinds of thunk that only contain other thunks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How a kernel is launched; 0 if unknown.

    Attributes:
      grid: blocks.
      cluster: blocks per cluster.
      threads: threads per block.
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
      branches: for each of these, which of its branches holds the thunk, counted as written; 0 if it has none.
      kernel: its name; a kernel that XLA reuses for several identical instructions has the name of the first.
      launch: the kernel's launch.
    """

    id: int
    kind: str
    parents: tuple[int, ...]
    branches: tuple[int, ...]
    kernel: str = ""
    launch: Launch = Launch()


@dataclasses.dataclass
class _Container:
    """A thunk that may contain the next line's; `branch` is the last one that began, -1 before the first."""

    indent: int
    id: int
    branch: int = -1


_THUNK = re.compile(r"^(?P<indent> *)(?P<id>\d+): (?P<kind>k\w+)\s*\[[^\]]*\]\s*(?P<rest>.*)$")
_LABEL = re.compile(r"^(?P<indent> *)\w+:\s*$")
_LAUNCH = re.compile(r"(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)")


def _launch(*sizes: str) -> Launch:
    x, y, z, threads_x, threads_y, threads_z, shared_bytes = (int(size) for size in sizes)
    return Launch(grid=x * y * z, threads=threads_x * threads_y * threads_z, shared_bytes=shared_bytes)


def read_thunks(text: str) -> list[Thunk]:
    """Read the thunks of `*.thunk_sequence_after_thunk_passes.txt`, in the order written.

    A line is `003: kCustomKernel [prev=002 (1) | sink] NAME grid: [..] threads: [..]  shared_memory: 0 bytes`;
    the contents of a container follow it, indented, each of a conditional's branches after a line such as
    `true_branch:`. Raises ValueError if there are no thunks.
    """
    thunks: list[Thunk] = []
    containers: list[_Container] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):  # "condition:" is not indented, so it belongs to no container
            outer = [container for container in containers if container.indent < len(label["indent"])]
            for container in outer[-1:]:
                container.branch += 1
        if not (match := _THUNK.match(line)):
            continue  # a label, or "No thunks."
        indent = len(match["indent"])
        containers = [container for container in containers if container.indent < indent]
        launch = _LAUNCH.search(match["rest"])
        thunk = Thunk(
            id=int(match["id"]),
            kind=match["kind"],
            parents=tuple(container.id for container in containers),
            branches=tuple(max(0, container.branch) for container in containers),
            kernel=launch[1] if launch else "",
            launch=_launch(*launch.groups()[1:]) if launch else Launch(),
        )
        thunks.append(thunk)
        containers.append(_Container(indent, thunk.id))
    if not thunks:
        raise ValueError("No thunk found in XLA's thunk sequence: its format has changed; see read_thunks.")
    return thunks


def read_thunk_names(text: str) -> dict[int, str]:
    """Map each thunk id to the instruction it runs, from `*.thunk_metadata.txt` (id 0 is not written)."""
    names = re.findall(r'profile_annotation: "([^"]*)"\s+(?:thunk_id: (\d+))?', text)
    return {int(number or 0): name for name, number in names}


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*)$")


def _op_name(line: str) -> str:
    """The part of the model that an instruction's line names, or nothing."""
    given = re.search(r'op_name="([^"]*)"', line)
    return given[1] if given else ""


def read_op_names(hlo: str) -> dict[str, str]:
    """Map each instruction to the part of the model that it belongs to ("jit(step)/layers.3/attention/dot_general").

    XLA drops the name of a product that it splits along K; such an instruction gets the name of a user of its result.
    """
    names: dict[str, str] = {}
    user_names: dict[str, str] = {}
    for line in reversed(hlo.splitlines()):  # users come after what they use
        if not (match := _INSTRUCTION.match(line)):
            continue
        names[match[1]] = _op_name(line) if "op_name=" in line else user_names.get(match[1], "")
        for operand in re.findall(r"%([\w.-]+)", match[2].split(", metadata=", 1)[0]):
            user_names[operand] = names[match[1]]
    return names


def read_predicates(hlo: str) -> frozenset[str]:
    """Read the conditionals that choose by a predicate; their true branch comes first, whatever the thunks call it.

    All others choose by an index, in whose order their branches come.
    """
    lines = (_INSTRUCTION.match(line) for line in hlo.splitlines() if ", true_computation=" in line)
    return frozenset(match[1] for match in lines if match)


def read_aliases(hlo: str) -> int:
    """Count the results written into a donated argument, from the first line of the optimised module."""
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
    """Read the values in temporary allocations of `*-buffer-assignment.txt`, largest first."""
    temporaries, inside = [], False
    for line in text.splitlines():
        if line.startswith("allocation "):
            inside = "-temp" in line
        elif inside and (match := _VALUE.match(line)):
            temporaries.append(Buffer(name=match[1], bytes=int(match[2]), shape=match[3]))
    return sorted(temporaries, key=lambda buffer: -buffer.bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicCall:
    """A Mosaic kernel in a module.

    Attributes:
      dump: the name of Mosaic's dumps for it, "NAME_7", where NAME is the `kernel_name`.
      launch: the kernel's launch.
    """

    dump: str
    launch: Launch


_ESCAPE = re.compile(r"\\([0-9A-F]{2})")


def read_mosaic_calls(hlo: str) -> dict[str, MosaicCall]:
    """Map each instruction to its Mosaic kernel, from the optimised module.

    The module has each kernel as MLIR bytecode, which contains strings verbatim, each after a zero byte: the function's
    name, "NAME_mosaic_gpu", and the name of its dumps. Raises ValueError if a kernel has none.
    """
    calls: dict[str, MosaicCall] = {}
    launches: dict[str, Launch] = {}  # a kernel that several layers use is read once
    for line in hlo.splitlines():
        if 'custom_call_target="mosaic_gpu' in line and (match := _INSTRUCTION.match(line)):
            function = re.search(r"\\00(?!stable_)(\w+)_mosaic_gpu\\00", line)  # "stable_mosaic_gpu" is a dialect
            dump = re.search(rf"\\00({function[1]}_\d+)\\00", line) if function else None
            module = re.search(r'\bmodule = "([^"]*)"', line)  # a quotation mark in it is escaped
            if dump is None or module is None:
                raise ValueError(f"No name in Mosaic kernel {match[1]}: its format has changed; see read_mosaic_calls.")
            if module[1] not in launches:
                text = _ESCAPE.sub(r"\\x\1", module[1].replace(r"\\", r"\5C"))
                launches[module[1]] = read_mosaic_launch(
                    text.encode("latin1").decode("unicode_escape").encode("latin1")
                )
            calls[match[1]] = MosaicCall(dump=dump[1], launch=launches[module[1]])
    return calls


def read_mosaic_launch(bytecode: bytes) -> Launch:
    """Read a kernel's launch from the module that Mosaic stores with it.

    Its `gpu.launch` has constants as operands: 3 for blocks, 3 for threads, 3 for blocks per cluster if there are
    clusters, and the bytes of shared memory. Raises ValueError if there is no launch.
    """
    from jax._src.lib import mosaic_gpu_dialect as dialect  # type: ignore[reportPrivateImportUsage]  # no public name
    from jax.interpreters import mlir

    with mlir.make_ir_context() as context:
        dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        operations: list[Any] = [mlir.ir.Module.parse(bytecode).operation]
        for operation in operations:  # grows while it is read
            if operation.name.endswith("gpu.launch"):
                return _mosaic_launch(operation)
            operations += (inner.operation for region in operation.regions for block in region for inner in block)
    raise ValueError("No launch found in Mosaic's module: its format has changed; see read_mosaic_launch.")


def _mosaic_launch(operation: Any) -> Launch:
    operands = iter(operation.operands)
    counts = list(operation.attributes["operandSegmentSizes"])  # tokens to wait for, then 0 or 1 of each size
    groups = [[next(operands) for _ in range(count)] for count in counts]
    sizes = [math.prod(value.owner.attributes["value"].value for value in group) for group in groups[1:11]]
    return Launch(
        grid=math.prod(sizes[0:3]),
        threads=math.prod(sizes[3:6]),
        cluster=math.prod(sizes[6:9]),
        shared_bytes=sizes[9] if groups[10] else 0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """The registers and memory that a kernel needs per thread, and its instructions.

    Attributes:
      registers: registers per thread.
      spill_bytes: bytes of registers spilled to memory per thread, stores and loads.
      instructions: how often each SASS instruction occurs in the kernel ("LDG.E.128": 8).
    """

    registers: int
    spill_bytes: int
    instructions: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """The `FEATURES` whose instructions occur in the kernel."""
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
    """Map each kernel to its resources, without instructions, from the output of `ptxas -v`."""
    resources = {}
    for block in text.split("Compiling entry function '")[1:]:
        stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", block)[:2]
        registers = re.search(r"Used (\d+) registers", block)
        assert registers is not None, block
        name = block.split("'", 1)[0]
        resources[name] = Resources(registers=int(registers[1]), spill_bytes=int(stores) + int(loads))
    return resources


_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def read_instructions(text: str) -> dict[str, Mapping[str, int]]:
    """Count how often each instruction occurs in each kernel, from the output of `nvdisasm`."""
    sections = re.split(r"^//-+ \.text\.(\S+) +-+$", text, flags=re.MULTILINE)[1:]
    return {name: Counter(_SASS.findall(code)) for name, code in zip(sections[::2], sections[1::2], strict=True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """An array that devices exchange in each run of the module; arrays that XLA combines count one by one.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute" or "ragged-all-to-all".
      dtype: XLA's name of it, such as "bf16".
      shape: the result's shape on each device.
      participants: devices that exchange with one another.
      trips: how often it runs, loops of an unknown number of turns counted once.
      in_loop: whether it is in a loop of an unknown number of turns.
      conditions: the `lax.cond`s that must hold for it to run, outermost first, by their places in the model.
      op_name: the part of the model that it belongs to.
      pairs: of a "collective-permute", which device sends to which.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    participants: int
    trips: int = 1
    in_loop: bool = False
    conditions: tuple[str, ...] = ()
    op_name: str = ""
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the result on each device."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (max(int(bits[0]) // 8, 1) if bits else 1)  # pred: 1

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, by the ring algorithms."""
        return wire_bytes(self.kind, self.bytes, self.participants)


_KINDS = "ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
_COLLECTIVE = re.compile(rf"^(?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<operands>[^)]*)\)(?P<rest>.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_CALLED = re.compile(r"\b(body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a computation: the caller, how often it calls (None: unknown), under which condition."""

    caller: str
    trips: int | None = 1
    condition: str = ""


def read_collectives(hlo: str, devices: int) -> list[Collective]:
    """Read the exchanges between `devices` devices, from a program's optimised module, in the order written.

    A computation that is called several times counts each time. Raises ValueError for groups in an unknown form.
    """
    computation, matches, entry = "", [], ""
    calls: dict[str, list[_Call]] = {}
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header["name"]
            entry = computation if header["entry"] else entry
        elif match := _INSTRUCTION.match(line):
            for called, call in _calls(match[2], computation, line):
                calls.setdefault(called, []).append(call)
            if collective := _COLLECTIVE.match(match[2]):
                matches.append((computation, collective, line))
    return [
        dataclasses.replace(collective, **context)
        for computation, match, line in matches
        for context in _contexts(computation, entry, calls)
        for collective in _exchanged(match, line, devices)
    ]


def _calls(instruction: str, caller: str, line: str) -> list[tuple[str, _Call]]:
    """The computations that an instruction calls, except reductions of pairs of numbers."""
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    called = []
    for kind, name in _CALLED.findall(instruction.split(", metadata=", 1)[0]):
        match kind:
            case "body":
                called.append((name, _Call(caller=caller, trips=int(trips[1]) if trips else None)))
            case "true_computation":
                called.append((name, _Call(caller=caller, condition=_op_name(line))))
            case _:
                called.append((name, _Call(caller=caller)))
    if branches := _BRANCHES.search(instruction):
        for index, name in enumerate(branches[1].split(",")):
            condition = _op_name(line) if index else ""
            called.append((name.strip().lstrip("%"), _Call(caller=caller, condition=condition)))
    return called


def _contexts(computation: str, entry: str, calls: Mapping[str, list[_Call]]) -> list[dict[str, Any]]:
    """Return how each path from the entry to a computation runs it."""
    if computation == entry:
        return [{"trips": 1, "in_loop": False, "conditions": ()}]
    contexts = []
    for call in calls.get(computation, ()):
        for outer in _contexts(call.caller, entry, calls):
            conditions = (*outer["conditions"], call.condition) if call.condition else outer["conditions"]
            in_loop = outer["in_loop"] or call.trips is None
            contexts.append({"trips": outer["trips"] * (call.trips or 1), "in_loop": in_loop, "conditions": conditions})
    return contexts


def _exchanged(match: re.Match[str], line: str, devices: int) -> list[Collective]:
    """A collective for each array; where it is started, the type may have the operands before the results."""
    kind, arrays = match["kind"], _ARRAY.findall(match["type"])
    operands = len(re.findall(r"%", match["operands"])) or 1
    if match["start"] and len(arrays) > operands:
        arrays = arrays[operands : 2 * operands]
    participants = _participants(match["rest"], devices)
    if participants == 1:
        return []
    return [
        Collective(
            kind=kind,
            dtype=dtype,
            shape=tuple(int(size) for size in sizes.split(",") if size),
            participants=participants,
            op_name=_op_name(line),
            pairs=_pairs(match["rest"]),
        )
        for dtype, sizes in arrays
    ]


def _pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """Return who sends to whom: `source_target_pairs={{0,1},{1,0}}`."""
    pairs = re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes)
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])) if pairs else ()


def _participants(attributes: str, devices: int) -> int:
    """Count a group's devices: `{{0,1},{2,3}}`, `[2,2]<=[4]`, `mesh['data'=2,'tensor'=2] {'tensor'}`, or all: `{}`."""
    if "source_target_pairs=" in attributes:
        return 2
    if explicit := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(explicit[1].split(","))
    if iota := re.search(r"replica_groups=\[(\d+(?:,\d+)*)\]<=", attributes):
        return int(iota[1].split(",")[-1])
    if mesh := re.search(r"replica_groups=\w*\s*mesh\[(.*?)\]\s*\{(.*?)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", mesh[2]))
    if re.search(r"replica_groups=\{\}", attributes):
        return devices
    raise ValueError(f"Unknown groups in a collective: {attributes[:200]}; see read_collectives.")
