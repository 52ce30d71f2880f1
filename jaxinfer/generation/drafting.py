"""When proposing tokens pays: a step over drafts takes longer than one without, and earns what is accepted."""

RETRY = 64
"""Tokens after which a request that was not worth drafting for is tried again; the wait doubles each time."""
SMOOTHING = 0.3


class DraftControl:
    """How many drafts one request may have in a pass.

    Attributes:
      limit: drafts for the next passes; 0 while they do not pay.
    """

    def __init__(self, most: int):
        self._most = most
        self._gain = float(most)  # accepted tokens per pass with drafts, smoothed; hopeful at first
        self._wait = RETRY
        self._until = 0

    def limit(self, produced: int) -> int:
        """Most drafts of a pass, after `produced` tokens of output."""
        return self._most if produced >= self._until else 0

    def record(self, passes: int, accepted: int, produced: int, cost: float) -> None:
        """Learn from passes with drafts.

        Args:
          passes, accepted: of these, and tokens accepted in them. produced: tokens of output so far.
          cost: how much longer a pass with drafts takes than one without, as a ratio.
        """
        if not passes:
            return
        weight = 1 - (1 - SMOOTHING) ** passes
        self._gain += weight * (accepted / passes - self._gain)
        if 1 + self._gain >= cost:
            self._wait = RETRY
        else:
            self._until = produced + self._wait
            self._wait *= 2
            self._gain = cost - 1  # one good pass after the wait keeps drafting, one bad pass ends it
