"""What experts cost: the performance matrix of paper section 4.5, one entry for each architecture and processor."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from jaxinfer.compiled import LinearFit
from jaxinfer.experts.errors import ProfileError

Tier = Literal["host", "disk"]
"""Where an expert is loaded from: a copy in the host's memory, or a file."""

PLATEAU = 0.05
"""How much slower than the best a batch size may be, for each request, and still be chosen for being smaller."""
MIN_R_SQUARED = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """What experts of an architecture cost on a processor.

    Attributes:
      k: seconds of one more request in a batch (the paper's K).
      b: seconds of a batch beside that (the paper's B).
      max_batch: the largest batch worth making.
      load: seconds to load an expert, by where it comes from.
      evict: seconds to copy an expert to the host's memory when it leaves a pool.
      activation_bytes: of one more request in a batch.
      latency: seconds of batches as measured, by size; beyond them, and where there are none, the line counts.
      workspace: bytes of batches as measured, by size; where there are none, `activation_bytes` of each request count.
    """

    k: float
    b: float
    max_batch: int
    load: Mapping[Tier, float]
    evict: float = 0.0
    activation_bytes: int = 0
    latency: Mapping[int, float] = dataclasses.field(default_factory=dict)
    workspace: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k) and self.k > 0):
            raise ProfileError(f"K must be more than 0 s, got {self.k}: measure again on a quiet machine.")
        if not (math.isfinite(self.b) and self.b >= 0):
            raise ProfileError(f"B must be at least 0 s, got {self.b}.")
        if self.max_batch < 1:
            raise ProfileError(f"max_batch must be at least 1, got {self.max_batch}.")
        if "disk" not in self.load:
            raise ProfileError("the time to load from disk is missing.")
        for tier, seconds in self.load.items():
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ProfileError(f"loading from {tier} must take at least 0 s, got {seconds}.")
        if self.activation_bytes < 0:
            raise ProfileError(f"activation_bytes must be at least 0, got {self.activation_bytes}.")

    def load_seconds(self, tier: Tier) -> float:
        """Seconds to load an expert from there; from disk where nothing else is known."""
        return self.load.get(tier, self.load["disk"])

    def padded(self, batch: int) -> int:
        """The size that a batch really runs as: the next larger measured one, if there is one."""
        return min((size for size in self.latency if size >= batch), default=batch)

    def seconds(self, batch: int) -> float:
        """Seconds of a batch of this size, with its padding: as measured, else K n + B."""
        padded = self.padded(batch)
        return self.latency.get(padded, self.k * padded + self.b)

    def scaled(self, factors: Mapping[str, float]) -> "Profile":
        """The same where a "batch", an "evict", or a load from a tier takes so many times as long; others as before."""
        batch = factors.get("batch", 1.0)
        return dataclasses.replace(
            self,
            k=self.k * batch,
            b=self.b * batch,
            latency={size: seconds * batch for size, seconds in self.latency.items()},
            load={tier: seconds * factors.get(tier, 1.0) for tier, seconds in self.load.items()},
            evict=self.evict * factors.get("evict", 1.0),
        )

    def activations(self, batch: int) -> int:
        """Bytes that a batch of this size takes beside its expert, with its padding."""
        padded = self.padded(batch)
        return self.workspace.get(padded, self.activation_bytes * padded)


Profiles = Mapping[tuple[str, str], Profile]
"""By architecture and processor, such as ("resnet101", "gpu")."""


def fit_latency(latency: Mapping[int, float]) -> tuple[float, float, float]:
    """K, B and R^2 of a line through seconds by batch size, by least squares; B is at least 0.

    Raises ProfileError for fewer than two sizes, K <= 0, or R^2 < 0.9.
    """
    if len(latency) < 2:
        raise ProfileError(f"K and B need the latency of at least two batch sizes, got {sorted(latency)}.")
    line = LinearFit.through(list(latency), list(latency.values()))
    if line.slope <= 0 or line.r2 < MIN_R_SQUARED:
        raise ProfileError(
            f"latency is no line over batch sizes (K={line.slope:.3g} s, R^2={line.r2:.2f}): {dict(latency)}; measure "
            "again on a quiet machine."
        )
    return line.slope, max(line.intercept, 0.0), line.r2


def choose_max_batch(latency: Mapping[int, float]) -> int:
    """The smallest batch size whose latency for each request is within 5% of the best (paper section 4.5)."""
    if not latency:
        raise ProfileError("max_batch needs the latency of at least one batch size.")
    average = {size: seconds / size for size, seconds in latency.items()}
    best = min(average.values())
    return min(size for size, seconds in average.items() if seconds <= best * (1 + PLATEAU))
