"""The costs of experts: the performance matrix of paper section 4.5, one entry per architecture and processor."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from jaxinfer.compiled import LinearFit
from jaxinfer.experts.errors import ProfileError

Tier = Literal["host", "disk"]
"""The source of a load: a copy in the host's memory, or a file."""

PLATEAU = 0.05
"""Factor by which a smaller batch size may be slower per request than the best and still be chosen."""
MIN_R_SQUARED = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """The costs of an architecture's experts on a processor.

    Attributes:
      k: seconds per additional request in a batch (the paper's K).
      b: seconds per batch on top of that (the paper's B).
      max_batch: the largest batch worth making.
      load: seconds to load an expert, by its source.
      evict: seconds to copy an expert to the host's memory when it leaves a pool.
      activation_bytes: bytes per additional request in a batch.
      latency: measured seconds of batches, by size; sizes beyond them follow the line K n + B.
      workspace: measured bytes of batches, by size; other sizes take `activation_bytes` per request.
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
        """The seconds to load an expert from a tier; those of the disk if the tier's are unknown."""
        return self.load.get(tier, self.load["disk"])

    def padded(self, batch: int) -> int:
        """The size that a batch really runs as: the next larger measured one, if there is one."""
        return min((size for size in self.latency if size >= batch), default=batch)

    def seconds(self, batch: int) -> float:
        """Compute the seconds of a batch of this size with its padding: measured, or K n + B."""
        padded = self.padded(batch)
        return self.latency.get(padded, self.k * padded + self.b)

    def scaled(self, factors: Mapping[str, float]) -> "Profile":
        """The profile with the times of "batch", "evict" and loads by tier multiplied by their factors."""
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
        """The bytes that a batch of this size, with its padding, takes on top of its expert."""
        padded = self.padded(batch)
        return self.workspace.get(padded, self.activation_bytes * padded)


Profiles = Mapping[tuple[str, str], Profile]
"""Profiles by architecture and processor, such as ("resnet101", "gpu")."""


def fit_latency(latency: Mapping[int, float]) -> tuple[float, float, float]:
    """Fit a least-squares line through seconds by batch size; return K, B (at least 0) and R^2.

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
    """Choose the smallest batch size whose latency per request is within 5% of the best (paper section 4.5)."""
    if not latency:
        raise ProfileError("max_batch needs the latency of at least one batch size.")
    average = {size: seconds / size for size, seconds in latency.items()}
    best = min(average.values())
    return min(size for size, seconds in average.items() if seconds <= best * (1 + PLATEAU))
