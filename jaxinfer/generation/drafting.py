"""When proposing tokens pays: a pass over drafts takes longer than one without, and earns what is accepted."""

RETRY = 64
"""Tokens after which a request that was not worth drafting for is tried again; the wait doubles each time."""
SMOOTHING = 0.3
UNKNOWN_COST = 2.0


class DraftControl:
    """How many drafts one request may have in a pass."""

    def __init__(self, most: int):
        self._most = most
        self._gain: float | None = None  # accepted tokens in a pass with drafts, smoothed
        self._wait = RETRY
        self._until = 0

    def limit(self, produced: int) -> int:
        """Most drafts of a pass, after `produced` tokens of output; 0 while they do not pay."""
        return self._most if produced >= self._until else 0

    def record(self, passes: int, accepted: int, produced: int, cost: float) -> None:
        """Learn from passes with drafts.

        Args:
          passes, accepted: of these, and tokens accepted in them. produced: tokens of output so far.
          cost: how much longer a pass with drafts takes than one without, as a ratio.
        """
        found = accepted / passes
        weight = 1 - (1 - SMOOTHING) ** passes
        self._gain = found if self._gain is None else self._gain + weight * (found - self._gain)
        if 1 + self._gain >= cost:
            self._wait = RETRY
        else:
            self._until = produced + self._wait
            self._wait *= 2
            self._gain = None  # the next try is judged by itself


class PassCosts:
    """Seconds of a decode pass of so many rows, with drafts and without."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._drafted: dict[int, float] = {}

    def record(self, rows: int, seconds: float, plain: int, drafted: int) -> None:
        """Learn from a dispatch of `plain` passes without and `drafted` passes with drafts."""
        if not drafted:
            _smooth(self._plain, rows, seconds / max(plain, 1))
        elif rows in self._plain or not plain:
            _smooth(self._drafted, rows, (seconds - plain * self._plain.get(rows, 0.0)) / drafted)

    def plain(self, rows: int) -> float | None:
        """A pass without drafts; None if there was none."""
        return self._plain.get(rows)

    def ratio(self, rows: int) -> float:
        """How much longer a pass with drafts takes than one without."""
        if rows not in self._plain or rows not in self._drafted:
            return UNKNOWN_COST
        return max(1.0, self._drafted[rows] / self._plain[rows])


def _smooth(known: dict[int, float], key: int, value: float) -> None:
    """Steps that overlap are timed to the host's notice of them: too short and too long in turn, right on average."""
    known[key] = value if key not in known else known[key] + SMOOTHING * (value - known[key])
