"""The usage of experts, learned from the requests for them."""

import math
from collections.abc import Iterator, Mapping

from jaxinfer.experts.scheduling.request import Request

HALF_LIFE = 50
"""Number of inputs after which an earlier input counts half as much: see docs/decisions/0033-usage-is-learned.md."""
DECAY = 0.5 ** (1 / HALF_LIFE)
"""Factor by which each input reduces the part of all inputs before it."""


class LearnedUsage(Mapping[str, float]):
    """The share of recent inputs that reaches each expert. It begins with the configured usage.

    With each input the usage u of an expert becomes d u + (1 - d) if the input reaches the expert, else d u; d is
    `DECAY`. So the configured usage counts as much as 1 / (1 - d) inputs at the start, and then fades.

    Args:
      configured: the usage to begin with.

    Attributes:
      scores: numbers in the order of usage, log2(u) plus the half-lives so far. An input changes only the scores of the
        experts that it reaches.

    >>> usage = LearnedUsage({"a": 1.0, "b": 0.0})
    >>> for number in range(HALF_LIFE):
    ...     usage.add(Request(id=number, expert="b", arrival=0.0))
    >>> {name: round(share, 6) for name, share in usage.items()}
    {'a': 0.5, 'b': 0.5}
    """

    def __init__(self, configured: Mapping[str, float]):
        self.scores = {name: math.log2(share) if share else -math.inf for name, share in configured.items()}
        self._inputs = 0

    def add(self, request: Request) -> None:
        """Count a request for an expert. A first stage is a new input; later stages belong to an earlier input."""
        self._inputs += request.stage == 0
        share = self[request.expert] + 1 - DECAY
        self.scores[request.expert] = math.log2(share) + self._inputs / HALF_LIFE

    def __getitem__(self, name: str) -> float:
        return 2.0 ** (self.scores[name] - self._inputs / HALF_LIFE)

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)
