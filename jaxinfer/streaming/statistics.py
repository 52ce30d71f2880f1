"""Observed streaming: bytes and seconds of each tier, and how much of fetching was hidden by computing."""

import collections
import dataclasses

from rich.filesize import decimal

RECENT = 64
"""Number of computations that a fetch can have overlapped."""

Interval = tuple[float, float]


@dataclasses.dataclass
class StreamingStatistics:
    """Sums over all layers since the last `clear`; seconds of the wall clock.

    Attributes:
      bytes: bytes moved from each tier, "host" and "disk".
      fetch_seconds: while a layer was on its way, from each tier; layers travel one after the other.
      cpu_seconds: CPU time of the threads that read files.
      compute_seconds: while layers were computed.
      overlapped_seconds: while both happened.
      stalls: number of waits for a layer.
      stalled_seconds: total time of these waits.
      layers: number of layers computed.
      kv_bytes: bytes of keys and values that came from the host's memory, with `kv_offload`.
      expert_hits: number of experts that were asked for and there.
      expert_fetches: number of experts that were fetched.
      expert_bytes: their bytes, which `bytes` includes.
    """

    bytes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    fetch_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    cpu_seconds: float = 0.0
    compute_seconds: float = 0.0
    overlapped_seconds: float = 0.0
    stalls: int = 0
    stalled_seconds: float = 0.0
    layers: int = 0
    kv_bytes: int = 0
    expert_hits: int = 0
    expert_fetches: int = 0
    expert_bytes: int = 0

    def __post_init__(self) -> None:
        self._computations: collections.deque[Interval] = collections.deque(maxlen=RECENT)
        self._fetched = float("-inf")  # when the last layer had come

    def clear(self) -> None:
        """Reset all sums."""
        self.__init__()

    def computed(self, interval: Interval, layers: int = 1) -> None:
        """Count a computation of `layers` layers."""
        self._computations.append(interval)
        self.layers += layers
        self.compute_seconds += interval[1] - interval[0]

    def fetched(self, tier: str, size: int, interval: Interval, cpu_seconds: float = 0.0) -> None:
        """Count a fetched layer; of its interval, only the time that the previous layer left of the link."""
        begin, end = max(interval[0], self._fetched), interval[1]
        self._fetched = max(end, self._fetched)
        self.bytes[tier] += size
        self.cpu_seconds += cpu_seconds
        self.fetch_seconds[tier] = self.fetch_seconds.get(tier, 0.0) + max(end - begin, 0.0)
        for first, last in reversed(self._computations):  # they ended one after the other
            if last <= begin:
                break
            self.overlapped_seconds += max(0.0, min(end, last) - max(begin, first))

    def stalled(self, seconds: float) -> None:
        """Count a wait for a layer."""
        self.stalls += 1
        self.stalled_seconds += seconds

    @property
    def overlap(self) -> float:
        """Share of the shorter one of fetching and computing that the other hid; 0 without either."""
        shorter = min(sum(self.fetch_seconds.values()), self.compute_seconds)
        return self.overlapped_seconds / shorter if shorter else 0.0

    def bandwidth(self, tier: str) -> float:
        """The bytes a second while layers came from a tier; 0 if none did."""
        seconds = self.fetch_seconds.get(tier, 0.0)
        return self.bytes[tier] / seconds if seconds else 0.0

    def __str__(self) -> str:
        tiers = "".join(f"{tier} {decimal(int(self.bandwidth(tier)))}/s, " for tier in self.bytes)
        asked = self.expert_hits + self.expert_fetches
        experts = f", {self.expert_hits / asked:.0%} of {asked} experts were there" if asked else ""
        kv = f", {decimal(self.kv_bytes)} of keys and values" if self.kv_bytes else ""
        stalls = f"{self.stalls} stalls of {self.stalled_seconds:.1f} s in all"
        return f"{tiers}overlap {self.overlap:.0%}, {stalls}{experts}{kv}"
