"""YNNPACK's fusions in XLA:CPU's optimised HLO, and those that compute garbage.

In jaxlib 0.11.2 and 0.12 a product whose right operand is a broadcast scalar, followed in one fusion by a reduction,
gives 1e28, inf or NaN, without an error.
"""

import math
import re
from typing import NamedTuple

_HEADER = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%(?P<name>\S+) = \w+\[(?P<sizes>[\d,]*)\]\S* (?P<opcode>[\w-]+)\((?P<rest>.*)$"
)
_ELEMENTWISE = {  # and what only moves elements: of scalars they make equal elements
    *("bitcast", "broadcast", "convert", "copy", "reshape", "transpose"),
    *("add", "divide", "exponential", "maximum", "minimum", "multiply", "negate", "select", "subtract"),
}


class Instruction(NamedTuple):
    """An instruction of a fused computation.

    Attributes:
      opcode: "dot", "reduce", "broadcast", ...
      elements: of its result.
      operands: names of instructions of the same computation.
    """

    opcode: str
    elements: int
    operands: tuple[str, ...]


Computation = dict[str, Instruction]


def ynn_fusions(hlo: str) -> dict[str, Computation]:
    """Return the computations that YNNPACK runs whole, by name, from a module's optimised text.

    Raises ValueError if an instruction of one cannot be read.
    """
    lines: dict[str, list[str]] = {}
    called, computation = [], ""
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            computation = header[1]
            lines[computation] = []
        elif line.startswith("  "):
            lines.setdefault(computation, []).append(line)
        if '"__ynn_fusion"' in line and (match := re.search(r"\bcalls=%([\w.-]+)", line)):
            called.append(match[1])
    return {name: dict(map(_parse, lines[name])) for name in called}


def _parse(line: str) -> tuple[str, Instruction]:
    if not (match := _INSTRUCTION.match(line)):
        raise ValueError(f"No instruction in {line!r}: the format of HLO has changed; see ynn_fusions.")
    elements = math.prod(map(int, filter(None, match["sizes"].split(","))))
    operands = re.findall(r"%([\w.-]+)", match["rest"].split(")", 1)[0])
    return match["name"], Instruction(match["opcode"], elements, tuple(operands))


def reduced_products(computation: Computation) -> list[str]:
    """Return the names of the products that a reduction in the same computation depends on."""
    reductions = [name for name, instruction in computation.items() if instruction.opcode == "reduce"]
    needed = set().union(*(_ancestors(computation, name) for name in reductions))
    return [name for name in computation if name in needed and computation[name].opcode == "dot"]


def garbled_products(hlo: str) -> list[str]:
    """Return the products with a broadcast scalar on the right whose fusion reduces them, as "FUSION: PRODUCT"."""
    return [
        f"{fusion}: {product}"
        for fusion, computation in ynn_fusions(hlo).items()
        for product in reduced_products(computation)
        if _is_broadcast_scalar(computation, computation[product].operands[1])
    ]


def _ancestors(computation: Computation, name: str) -> set[str]:
    ancestors, waiting = set(), [name]
    while waiting:
        for operand in computation[waiting.pop()].operands:
            if operand not in ancestors:
                ancestors.add(operand)
                waiting.append(operand)
    return ancestors


def _is_broadcast_scalar(computation: Computation, name: str) -> bool:
    """Tell whether a value has several elements, which all come of scalars in this computation."""
    opcode, elements, operands = computation[name]
    if elements == 1 or opcode not in _ELEMENTWISE:
        return False
    return all(computation[operand].elements == 1 or _is_broadcast_scalar(computation, operand) for operand in operands)
