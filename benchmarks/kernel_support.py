"""Table of operations that run as a kernel, or as plain XLA and why, by GPU.

    python -m benchmarks.kernel_support [--write]

Asks the kernels about every case of `kernel_cases.py` on every target. Nothing is compiled, and no GPU is needed.
`--write` updates the table in docs/kernels.md; `tests/benchmarks/test_kernel_support.py` checks it.
"""

import argparse
import contextlib
import logging
from collections.abc import Mapping
from unittest import mock

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernel_cases import Case, every_case
from benchmarks.kernel_table import put_into_page
from benchmarks.prose import wrapped
from jaxinfer.compiled.target import Target
from jaxinfer.pallas_kernels.dispatch import kernels_available, recorded_refusals
from jaxinfer.pallas_kernels.target import GPU, targeting

Support = dict[str, dict[str, str | None]]
"""Cases of every operation: the reason that they run as plain XLA, or None if they run as kernels."""


def support_of(gpu: GPU) -> Support:
    """Ask which cases run as kernels on this GPU."""
    support: Support = {}
    with targeting(gpu):
        available = kernels_available()
        for case in every_case():
            reason = refusal(case) if available else "kernels need sm_90 or newer"
            support.setdefault(case.op, {})[case.name] = reason
    return support


class _LaunchedError(Exception):
    """A kernel was about to be traced: it has refused nothing."""


def _launch(*_args: object, **_options: object) -> None:
    raise _LaunchedError


def refusal(case: Case) -> str | None:
    """Return why the case runs as plain XLA, or None.

    Stops at the kernel's launch, whose body takes most of the time to trace.
    """
    launches = mock.patch.object(plgpu, "kernel", _launch)
    with recorded_refusals() as refusals, launches, contextlib.suppress(_LaunchedError):
        jax.eval_shape(lambda *args: case.call(*args), *case.args)
    return refusals.get(case.op)


def markdown(supports: Mapping[str, Support]) -> str:
    """Format the table of docs/kernels.md, with a column for all targets that agree."""
    notes: list[str] = []
    columns: dict[tuple[str, ...], list[str]] = {}
    for target, support in supports.items():
        columns.setdefault(tuple(_cell(cases, notes) for cases in support.values()), []).append(target)
    rows = zip(next(iter(supports.values())), *columns, strict=True)
    head = ["operation", *(", ".join(targets) for targets in columns.values())]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    numbered = (wrapped(f"{i}. {note}", indent=len(f"{i}. ")) for i, note in enumerate(notes, 1))
    return "\n".join([*lines, "", *numbered]) + "\n"


def _cell(cases: Mapping[str, str | None], notes: list[str]) -> str:
    refused = {name: reason for name, reason in cases.items() if reason is not None}
    if not refused:
        return "kernel"
    note = "; ".join(sorted(set(refused.values())))
    if len(refused) < len(cases):
        note = f"{'; '.join(refused)}: {note}"
    if note not in notes:
        notes.append(note)
    runs = "XLA" if len(refused) == len(cases) else f"kernel; XLA in {len(refused)} of {len(cases)} cases"
    return f"{runs} ({notes.index(note) + 1})"


def main() -> None:
    """Print the table, and put it into the page on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels.md")
    options = parser.parse_args()
    logging.getLogger("jaxinfer.kernels").setLevel(logging.ERROR)  # the table says it
    table = markdown({name: support_of(Target.load(name).gpu) for name in Target.names()})
    print(table)
    if options.write:
        put_into_page("benchmarks.kernel_support", table)


if __name__ == "__main__":
    main()
