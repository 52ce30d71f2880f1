"""Readers of the text that XLA:GPU writes about a compiled module (`xla_dump_to`): what runs, and where it lives.

Pure functions from text to data; `target.py` produces the text. The formats are XLA's own and carry no promise, so
each reader says what it reads and refuses text in which it finds nothing.
"""

import dataclasses
import re

CONTROL = frozenset({"kCommandBuffer", "kWhile", "kConditional", "kSequential"})
"""Kinds of thunk that only hold other thunks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thunk:
    """One entry of XLA's thunk sequence: a kernel, a copy, a library call, or a holder of such (`CONTROL`).

    `parents` are the ids of its holders, outermost first. A kernel that XLA reuses for several identical
    instructions keeps the name of the first.
    """

    id: int
    kind: str
    parents: tuple[int, ...]
    kernel: str = ""
    grid: int = 0  # blocks
    threads: int = 0  # per block
    shared_bytes: int = 0


_THUNK = re.compile(r"^(?P<indent> *)(?P<id>\d+): (?P<kind>k\w+)\s*\[[^\]]*\]\s*(?P<rest>.*)$")
_LAUNCH = re.compile(r"(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)")


def read_thunks(text: str) -> list[Thunk]:
    """The thunks of `*.thunk_sequence_after_thunk_passes.txt`, in the order written.

    A line is `003: kCustomKernel [prev=002 (1) | sink] NAME grid: [..] threads: [..]  shared_memory: 0 bytes`;
    what a holder holds stands below it, further to the right.
    """
    thunks: list[Thunk] = []
    holders: list[tuple[int, int]] = []  # indent and id of the thunks that may hold the next one
    for line in text.splitlines():
        if not (match := _THUNK.match(line)):
            continue  # "body:", "true_branch:", "No thunks."
        indent = len(match["indent"])
        holders = [(at, holder) for at, holder in holders if at < indent]
        launch = _LAUNCH.search(match["rest"])
        sizes = [int(size) for size in launch.groups()[1:]] if launch else [0] * 7
        thunk = Thunk(
            id=int(match["id"]),
            kind=match["kind"],
            parents=tuple(holder for _, holder in holders),
            kernel=launch[1] if launch else "",
            grid=sizes[0] * sizes[1] * sizes[2],
            threads=sizes[3] * sizes[4] * sizes[5],
            shared_bytes=sizes[6],
        )
        thunks.append(thunk)
        holders.append((indent, thunk.id))
    if not thunks:
        raise ValueError("No thunk found in XLA's thunk sequence: its format has changed; see read_thunks.")
    return thunks


def read_thunk_names(text: str) -> dict[int, str]:
    """Thunk id -> the instruction it runs, from `*.thunk_metadata.txt` (id 0 is not written)."""
    names = re.findall(r'profile_annotation: "([^"]*)"\s+(?:thunk_id: (\d+))?', text)
    return {int(number or 0): name for name, number in names}


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*)$")


def read_op_names(hlo: str) -> dict[str, str]:
    """Instruction -> where in the model it comes from ("jit(step)/layers.3/attention/dot_general").

    XLA drops the name of a product that it splits along K; such an instruction takes that of a user of its result.
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
    """How many results are written into a donated argument, from the head of the optimised module."""
    return len(re.findall(r"\{[\d, ]*\}: \(\d+, ", hlo.split("\n", 1)[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A value that lives in the workspace while the program runs; several share memory at different times."""

    name: str
    shape: str
    bytes: int


_VALUE = re.compile(
    r"^ value: <\d+ (\S+) @\d+> \(size=(\d+),offset=\d+\): ([^{\s(]+)"
)  # a tuple is but a table of pointers


def read_temporaries(text: str) -> list[Buffer]:
    """The values in temporary allocations of `*-buffer-assignment.txt`, largest first."""
    temporaries, inside = [], False
    for line in text.splitlines():
        if line.startswith("allocation "):
            inside = "-temp" in line
        elif inside and (match := _VALUE.match(line)):
            temporaries.append(Buffer(name=match[1], bytes=int(match[2]), shape=match[3]))
    return sorted(temporaries, key=lambda buffer: -buffer.bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What one thread of a kernel takes. Spills are registers that went to memory."""

    registers: int
    spill_bytes: int


def read_resources(text: str) -> dict[str, Resources]:
    """Kernel -> its resources, from what `ptxas -v` prints."""
    found = {}
    for block in text.split("Compiling entry function '")[1:]:
        stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", block)[:2]
        registers = re.search(r"Used (\d+) registers", block)
        assert registers is not None, block
        name = block.split("'", 1)[0]
        found[name] = Resources(registers=int(registers[1]), spill_bytes=int(stores) + int(loads))
    return found
