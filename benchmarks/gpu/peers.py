"""Our kernels and our generation next to other libraries, timed in turns; the last stage, because peers may fail.

PyTorch and transformers run in a process of their own (`peer.py`), which ends with the worker.
"""

import functools
from collections.abc import Callable

from benchmarks.gpu import cases, end_to_end
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.end_to_end import MODELS, Setup
from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.kernels import OURS, KernelBench
from benchmarks.gpu.others import OTHERS
from benchmarks.gpu.peer import AbsentError, Peer, torch_request
from benchmarks.kernel_cases import Case

TORCH = "torch"


def items(context: Context) -> list[Item]:
    """List the models with transformers, then the cases that another library has too."""
    peer = functools.cache(lambda: Peer(context.peer_python))
    bench = end_to_end.Bench(context.rows, context.effort)
    setups = [Setup(model=model, fmt="bfloat16", batch=1, peer=True) for model in MODELS[: 1 if context.dry else None]]
    timed = cases.tiny_timed() if context.dry else cases.timed()
    compared = [case for case in timed if case.op in OTHERS or torch_request(case) is not None]
    return [
        Item("versions", lambda: context.rows.row(part="peers", what="versions", versions=peer().version)),
        *(Item(setup.title, functools.partial(_generate, bench, setup, peer)) for setup in setups),
        *(Item(case.title, functools.partial(_measure, context, case, peer)) for case in compared),
    ]


def _generate(bench: end_to_end.Bench, setup: Setup, peer: Callable[[], Peer]) -> None:
    bench.measure(setup, peer())


def _measure(context: Context, case: Case, peer: Callable[[], Peer]) -> None:
    ceilings = Ceilings.from_rows(context.rows.read())
    bench = KernelBench(context.rows, "kernels of peers", case, ceilings, context.effort)
    bench.add(OURS, case.call)
    for way, call in OTHERS.get(case.op, {}).items():
        bench.add(way, call)
    rounds = {}
    if (request := torch_request(case)) is not None:
        try:
            peer().forget()
            rounds[TORCH] = peer().prepare(**request).round()
        except AbsentError as error:
            bench.absent(TORCH, str(error))
    bench.measure(rounds)
