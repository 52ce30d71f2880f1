"""Experts that could not be loaded, and when they may be tried again."""

import dataclasses

from jaxinfer.experts.scheduling.request import Load

FIRST_BACK_OFF = 1.0
"""Seconds before an expert that could not be loaded is tried again; each further failure doubles them."""
MAX_BACK_OFF = 60.0


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """The time in which an expert is not loaded to a pool.

    Attributes:
      until: when it ends.
      back_off: its length in seconds.
      reason: the error of the load before it.
    """

    until: float
    back_off: float
    reason: str


class Quarantines:
    """The quarantines of a system. After one has ended, the next failure of the same load begins a longer one."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], Quarantine] = {}  # by expert and pool

    def find(self, expert: str, pool: int, now: float) -> Quarantine | None:
        """Find the quarantine of an expert in a pool; None if the expert may be loaded."""
        quarantine = self._all.get((expert, pool))
        return quarantine if quarantine is not None and now < quarantine.until else None

    def begin(self, load: Load, error: Exception, now: float) -> None:
        """Begin the quarantine after a load that failed."""
        before = self._all.get((load.expert, load.pool))
        back_off = min(before.back_off * 2, MAX_BACK_OFF) if before else FIRST_BACK_OFF
        self._all[load.expert, load.pool] = Quarantine(now + back_off, back_off, str(error))

    def forget(self, load: Load) -> None:
        """Forget the failures of a load that has succeeded."""
        self._all.pop((load.expert, load.pool), None)

    def lift(self, expert: str) -> None:
        """End the quarantines of an expert in all pools."""
        self._all = {key: each for key, each in self._all.items() if key[0] != expert}
