"""Threads of a loop: daemons with a name, for which a caller waits with patience."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any


def make_thread(run: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    """Make a thread `jaxinfer-NAME`, which does not keep the process alive."""
    return threading.Thread(target=run, args=args, name=f"jaxinfer-{name}", daemon=True)


def join_threads(
    threads: Iterable[threading.Thread], until: float | None, progress: Callable[[], int], patience: float
) -> bool:
    """Wait for threads; return whether they have ended.

    Args:
      threads: which have been started.
      until: when to give up, by `time.monotonic`; None: once there has been no progress for `patience` seconds.
      progress: counts what the threads have done.
      patience: in seconds.
    """
    for thread in threads:
        before = -1
        while thread.is_alive() and (until is not None or before != progress()):
            before = progress()
            thread.join(patience if until is None else max(until - time.monotonic(), 0.0))
            if until is not None:
                break
        if thread.is_alive():
            return False
    return True
