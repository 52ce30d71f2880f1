"""When speculation pays: a pass with speculative tokens takes longer than one without, and earns those accepted."""

RETRY = 64
"""Output tokens after which a request that speculation did not pay for is tried again; the wait doubles each time."""
SMOOTHING = 0.3
UNKNOWN_COST = 2.0


class SpeculationControl:
    """How many speculative tokens one request may have in a pass."""

    def __init__(self, num_speculative_tokens: int):
        self._max = num_speculative_tokens
        self._gain: float | None = None  # accepted tokens in a speculative pass, smoothed
        self._wait = RETRY
        self._until = 0

    def limit(self, num_output_tokens: int) -> int:
        """How many speculative tokens a pass may have, after this much output; 0 while they do not pay."""
        return self._max if num_output_tokens >= self._until else 0

    def record(self, *, passes: int, accepted: int, num_output_tokens: int, cost: float) -> None:
        """Learn from speculative passes.

        Args:
          passes: how many.
          accepted: tokens accepted in them.
          num_output_tokens: tokens of output so far.
          cost: how much longer a speculative pass takes than a plain one, as a ratio.
        """
        found = accepted / passes
        weight = 1 - (1 - SMOOTHING) ** passes
        self._gain = found if self._gain is None else self._gain + weight * (found - self._gain)
        if 1 + self._gain >= cost:
            self._wait = RETRY
        else:
            self._until = num_output_tokens + self._wait
            self._wait *= 2
            self._gain = None  # the next try is judged by itself


class PassCosts:
    """Seconds of a decode pass by its number of rows, plain and speculative."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._speculative: dict[int, float] = {}

    def record(self, rows: int, seconds: float, *, plain: int, speculative: int) -> None:
        """Learn from a step of `plain` and `speculative` passes."""
        if not speculative:
            _smooth(self._plain, rows, seconds / max(plain, 1))
        elif rows in self._plain or not plain:
            _smooth(self._speculative, rows, (seconds - plain * self._plain.get(rows, 0.0)) / speculative)

    def plain(self, rows: int) -> float | None:
        """A plain pass; None if there was none."""
        return self._plain.get(rows)

    def ratio(self, rows: int) -> float:
        """How much longer a speculative pass takes than a plain one."""
        if rows not in self._plain or rows not in self._speculative:
            return UNKNOWN_COST
        return max(1.0, self._speculative[rows] / self._plain[rows])


def _smooth(known: dict[int, float], key: int, value: float) -> None:
    """Steps that overlap are timed to the host's notice of them: too short and too long in turn, right on average."""
    known[key] = value if key not in known else known[key] + SMOOTHING * (value - known[key])
