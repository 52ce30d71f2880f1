"""The stages of a run, in order: shares of its time, and limits of their items. Imports no JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A module of this folder, whose function `items` lists what it measures.

    Attributes:
      share: weight by which the time is divided.
      first: seconds until a worker has started and finished its first item. later: seconds for each item after it.
      selected: whether it runs unless `--only` says otherwise.
      timed: whether it measures times. Otherwise XLA chooses its products without measuring them, which saves time.
    """

    share: float
    first: float
    later: float
    selected: bool = True
    timed: bool = True


STAGES = {
    "machine": Stage(share=10, first=60, later=20, timed=False),
    "numerics": Stage(share=26, first=75, later=30, timed=False),
    "demo": Stage(share=12, first=90, later=60, timed=False),
    "ceilings": Stage(share=12, first=60, later=20),
    "kernels": Stage(share=18, first=75, later=20),
    "autotune": Stage(share=36, first=120, later=60, selected=False),
    "end_to_end": Stage(share=20, first=110, later=60),
    "peers": Stage(share=12, first=100, later=60),
    "streaming": Stage(share=36, first=300, later=120, selected=False),
}
ALWAYS = ("machine", "ceilings")
"""Stages that every run begins with or needs: what the machine is, and the limits that times are compared with."""
