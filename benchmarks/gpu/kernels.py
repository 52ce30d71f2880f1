"""Times of every kernel, of XLA's code for the same operation, and of other libraries, as fractions of the ceiling.

The ceiling of a case is its roofline: the time for its bytes at the measured bandwidth, or for its FLOPs at the
measured rate, whichever is longer.
"""

import collections
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.others import OTHERS
from benchmarks.gpu.peer import AbsentError, Peer, torch_request
from benchmarks.gpu.timing import Arguments, Effort, Plan, Repeated, Round, compile_all, interleave
from benchmarks.kernel_cases import Case
from benchmarks.report import Report
from jaxinfer.pallas_kernels.dispatch import without_kernels

OURS, XLA, TORCH = "jaxinfer", "XLA", "torch"
COMPILE_BATCH = 8  # number of cases compiled together


def measure(
    report: Report, ceilings: Ceilings, clock: Clock, peer: Peer, cases: Iterable[Case], effort: Effort
) -> None:
    """Report every case and implementation; per operation, the worst and mean speedup over XLA's code."""
    cases, done = list(cases), 0
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    for group in clock.affordable([cases[i : i + COMPILE_BATCH] for i in range(0, len(cases), COMPILE_BATCH)]):
        for case, programs in compiled(group, ceilings, report, effort):
            times = _times(case, programs, peer, report, effort)
            min_time = ceilings.seconds(case.bytes, case.flops, case.operands)
            for way, timing in times.items():
                report.row(
                    part="kernels",
                    op=case.op,
                    case=case.name,
                    way=way,
                    us=round(1e6 * timing.seconds, 3),
                    of_ceiling=round(min_time / timing.seconds, 4),
                    spread=round(timing.spread, 4),
                )
            if OURS in times:
                ratios[case.op].append(times[XLA].seconds / times[OURS].seconds)
            shown = ", ".join(
                f"{way} {1e6 * t.seconds:.1f} us ({min_time / t.seconds:.0%})" for way, t in times.items()
            )
            print(f"kernels: {case.title}: {shown}", flush=True)
        done += len(group)
    for case in cases[done:]:
        report.row(part="kernels", op=case.op, case=case.name, absent="no time left; see --minutes")
    for op, speedups in ratios.items():
        report.row(
            part="kernels", op=op, cases=len(speedups), mean_vs_xla=round(statistics.geometric_mean(speedups), 3)
        )
        report.check(f"{op}_worst_vs_xla", min(speedups), "x", target=1.0)


def compiled(
    cases: list[Case], ceilings: Ceilings, report: Report, effort: Effort
) -> Iterator[tuple[Case, dict[str, Repeated]]]:
    """Compile the programs of each case by implementation, all at once; report failures as absent."""
    programs: dict[Case, dict[str, Repeated]] = {}
    for case in cases:
        plan = Plan.from_case(case, ceilings.seconds(case.bytes, case.flops, case.operands), effort)
        programs[case] = _lowered(case, plan, report)
    failed = compile_all([program for ways in programs.values() for program in ways.values()])
    for case, ways in programs.items():
        for way, program in ways.items():
            if program in failed:
                report.row(part="kernels", op=case.op, case=case.name, way=way, absent=failed[program])
        yield case, {way: program for way, program in ways.items() if program not in failed}


def _lowered(case: Case, plan: Plan, report: Report) -> dict[str, Repeated]:
    programs = {OURS: Repeated(case, plan, case.call)}
    with without_kernels():
        programs[XLA] = Repeated(case, plan, case.call)
    if not programs[OURS].has_kernel:
        report.row(part="kernels", op=case.op, case=case.name, way=OURS, absent="not supported by the kernel")
        del programs[OURS]
    for way, call in OTHERS.get(case.op, {}).items():
        try:
            programs[way] = Repeated(case, plan, call)
        except Exception as error:  # any error of the other library
            absent = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            report.row(part="kernels", op=case.op, case=case.name, way=way, absent=absent)
    return programs


def _times(case: Case, programs: dict[str, Repeated], peer: Peer, report: Report, effort: Effort) -> dict[str, Any]:
    arguments = Arguments.make(case, next(iter(programs.values())).plan)
    ways: dict[str, Round] = {way: program.round(arguments, effort) for way, program in programs.items()}
    if (request := torch_request(case)) is not None:
        try:
            ways[TORCH] = peer.prepare(**request).round()
        except AbsentError as error:
            report.row(part="kernels", op=case.op, case=case.name, way=TORCH, absent=str(error))
    times = interleave(ways, effort.rounds)
    peer.forget()
    return times
