"""Memory that one engine has given back, and that the next one takes over if its arrays have the same shapes.

New memory costs as much time as what is read into it: the system clears every page first.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator

from jaxinfer.checkpoints.stores import Staging
from jaxinfer.generation.execution.state import DeviceState

STAGING = Staging()
"""The buffers that weights are read into, and the threads that read them, of all engines that sleep."""


class SpareStates:
    """The KV caches and slots of engines that have fallen asleep, by their shapes. Their content has no meaning."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[Hashable, DeviceState] = {}

    def give(self, shapes: Hashable, state: DeviceState) -> None:
        """Take a state in which no slot is active."""
        with self._lock:
            self._states[shapes] = state

    def take(self, shapes: Hashable) -> DeviceState | None:
        """Return a state of these shapes, if there is one."""
        with self._lock:
            return self._states.pop(shapes, None)

    def clear(self) -> None:
        """Free all states."""
        with self._lock:
            self._states.clear()


STATES = SpareStates()
"""The states of all engines in this process."""


_takers = list[object]()  # engines that wake up


def free_spares() -> None:
    """Free the memory that no engine has taken over, unless one is waking up."""
    if not _takers:
        STAGING.trim()
        STATES.clear()


@contextlib.contextmanager
def keeping_spares() -> Iterator[None]:
    """Keep what engines give back meanwhile for the one that wakes up, and then free the rest."""
    me = object()
    _takers.append(me)
    try:
        yield
    finally:
        _takers.remove(me)
        free_spares()
