"""Times of every kernel and of XLA's code for the same operation, as fractions of the ceiling.

The ceiling of a case is its roofline: the time for its bytes at the measured bandwidth, or for its FLOPs at the
measured rate, whichever is longer.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu import cases
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.timing import Arguments, Effort, Plan, Repeated, Round, compile_all, interleave
from benchmarks.kernel_cases import Case
from jaxinfer.pallas_kernels.dispatch import without_kernels

OURS, XLA = "jaxinfer", "XLA"


def items(context: Context) -> list[Item]:
    """List the cases of real models."""
    timed = cases.tiny_timed() if context.dry else cases.timed()
    return [Item(case.title, functools.partial(_measure, context, case)) for case in timed]


def _measure(context: Context, case: Case) -> None:
    bench = KernelBench(context.rows, "kernels", case, Ceilings.from_rows(context.rows.read()), context.effort)
    bench.add(OURS, case.call)
    with without_kernels():
        bench.add(XLA, case.call)
    bench.measure()


class KernelBench:
    """Implementations of one case, compiled together and timed in turns.

    Args:
      part: what the rows are part of.
    """

    def __init__(self, rows: Rows, part: str, case: Case, ceilings: Ceilings, effort: Effort):
        self._rows, self._part, self._case, self._effort = rows, part, case, effort
        self._floor = ceilings.seconds(case.bytes, case.flops, case.operands)
        self._plan = Plan.from_case(case, self._floor, effort)
        self._programs: dict[str, Repeated] = {}

    def add(self, way: str, call: Callable[..., Any]) -> None:
        """Lower an implementation that JAX can call, or report why that fails."""
        try:
            program = Repeated(self._case, self._plan, call)
        except Exception as error:  # any error of another library
            return self.absent(way, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if way == OURS and not program.has_kernel:
            return self.absent(way, "not supported by the kernel")
        self._programs[way] = program

    def absent(self, way: str, reason: str) -> None:
        """Report that an implementation cannot be measured."""
        self._row(way=way, absent=reason)

    def measure(self, others: Mapping[str, Round] | None = None) -> None:
        """Time all implementations; `others`: rounds that another process runs."""
        for program, reason in compile_all(list(self._programs.values())).items():
            (way,) = [way for way, failed in self._programs.items() if failed is program]
            self.absent(way, reason)
            del self._programs[way]
        arguments = Arguments.make(self._case, self._plan)
        rounds = {way: program.round(arguments, self._effort) for way, program in self._programs.items()}
        for way, timing in interleave(rounds | dict(others or {}), self._effort.rounds).items():
            self._row(
                way=way,
                us=round(1e6 * timing.seconds, 3),
                of_ceiling=round(self._floor / timing.seconds, 4),
                spread=round(timing.spread, 4),
            )

    def _row(self, **fields: Any) -> None:
        self._rows.row(part=self._part, op=self._case.op, case=self._case.name, **fields)
