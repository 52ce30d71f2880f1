"""Memory that one engine has given back, and that the next one takes over if its arrays have the same shapes.

New memory costs as much time as what is read into it: the system clears every page first.
"""

import threading
from collections.abc import Hashable

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


def free_spares() -> None:
    """Free the memory that no engine has taken over."""
    STAGING.trim()
    STATES.clear()
