"""`EnginePlan`: what is decided once, from this process's clock and free memory, before an engine is built."""

import dataclasses

from jaxinfer.compiled import Costs
from jaxinfer.streaming.config import Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """All in which two processes that run the same engine might differ.

    Attributes:
      num_pages: pages of a decoder's cache; `memory.plan_memory` computes how many fit.
      max_chunks: how many chunks of a step go through a streamed layer together; None: all.
      placement: the place of each layer, and how far ahead layers are fetched; None: all are on the devices.
      costs: what passes and fetches took so far, by which the scheduler chooses passes and speculation.
    """

    num_pages: int = 0
    max_chunks: int | None = None
    placement: Placement | None = None
    costs: Costs = dataclasses.field(default_factory=Costs)
