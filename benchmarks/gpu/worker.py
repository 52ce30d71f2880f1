"""Runs the items of one stage, from a number on, in a process of its own: `supervisor.py` starts it.

It names each item before the item begins, so that the parent knows what a dead worker was doing. An item that raises
an error is reported, and the next one runs. After an error of CUDA the process ends, because its context may be lost.
"""

import contextlib
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.settings import LOST_CONTEXT, Progress, Settings
from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted

CUDA_ERROR = "CUDA_ERROR_"
"""How the names of errors begin after which a process may not be able to use its GPU any more."""


def run(stage: str, first: int, settings: Settings) -> None:
    """Run the items of a stage from number `first` on."""
    context = Context(settings.rows, Path(settings.folder), settings.dry, Path(settings.peer_python))
    items: list[Item] = importlib.import_module(f"benchmarks.gpu.{stage}").items(context)
    titles = tuple(item.title for item in items)
    for number in range(first, len(items)):
        Progress(titles, number).write(settings.progress)
        _run(stage, items[number], settings, settings.faults.get(f"{stage}.{number}"))


def _run(stage: str, item: Item, settings: Settings, fault: str | None) -> None:
    print(f"{stage}: {item.title}", flush=True)
    start = time.perf_counter()
    try:
        if fault is not None:
            _fail(fault)
        item.run()
    except (Exception, SystemExit) as error:  # the latter: a peer that cannot run
        traceback.print_exc()
        settings.rows.row(part=stage, what=item.title, absent=f"{type(error).__name__}: {str(error)[:300]}")
        if CUDA_ERROR in str(error):
            _exit(LOST_CONTEXT)
    else:
        seconds = round(time.perf_counter() - start, 2)
        settings.rows.row(part="items", stage=stage, what=item.title, seconds=seconds)


def _fail(kind: str) -> None:
    """Fail on purpose, as `Settings.faults` says."""
    match kind:
        case "abort":
            os.abort()
        case "hang":
            time.sleep(1 << 20)
        case "illegal-address":
            raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")


def _exit(status: int) -> None:
    """End without tearing anything down: with a lost context that may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Run what the command line says: the stage, the number of its first item, and the settings."""
    stage, first, text = sys.argv[1:]
    settings = Settings.loads(text)
    with interpreted(detect_races=False) if settings.dry else contextlib.nullcontext():
        run(stage, int(first), settings)
    _exit(0)


if __name__ == "__main__":
    main()
