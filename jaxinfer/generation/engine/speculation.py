"""When speculation pays off: a speculative pass takes longer than a plain one, and gains the accepted tokens."""

from collections.abc import Sequence

from jaxinfer.compiled import Bucket, Costs

RETRY = 16
"""Output tokens after which speculation is retried for a request that it did not pay off for; doubled each time."""
SMOOTHING = 0.3
UNKNOWN_COST = 2.0
DECODE, PREFILL = "decode", "prefill"
"""The names of the programs that decode, and compute prompts, with all layers; passes of other kinds do both."""
TRIES = 3
"""Steps by which each way of rows through a pipeline is judged, at least."""


class SpeculationControl:
    """How many speculative tokens one request may have in a pass."""

    def __init__(self, num_speculative_tokens: int):
        self._max = num_speculative_tokens
        self._gain: float | None = None  # accepted tokens in a speculative pass, smoothed
        self._wait = RETRY
        self._until = 0

    def limit(self, num_output_tokens: int) -> int:
        """Return how many speculative tokens a pass may have, after this much output; 0 while they do not pay off."""
        return self._max if num_output_tokens >= self._until else 0

    def record(self, *, passes: int, accepted: int, num_output_tokens: int, cost: float) -> None:
        """Learn from speculative passes.

        Args:
          passes: the number of speculative passes.
          accepted: tokens accepted in them.
          num_output_tokens: tokens of output so far.
          cost: the time of a speculative pass over that of a plain one.
        """
        gain = accepted / passes
        weight = 1 - (1 - SMOOTHING) ** passes
        self._gain = gain if self._gain is None else self._gain + weight * (gain - self._gain)
        if 1 + self._gain >= cost:
            self._wait = RETRY
        else:
            self._until = num_output_tokens + self._wait
            self._wait *= 2
            self._gain = None  # the next try is judged on its own


class PassCosts:
    """Seconds of a decode pass by its number of rows, plain and speculative, in the record of all costs.

    A pass is recorded at its own sizes: `speculative` is 0 for the plain passes of a program that can speculate.

    Args:
      costs: the record.
      num_speculative_tokens: speculative tokens of each row in a speculative pass.
      name: the name of a decode pass in the record.
      stages: of a pipeline; 1: there is none.
      chunks: the numbers of chunks of steps.

    Attributes:
      all: the record.
      stages: as given.
    """

    def __init__(
        self,
        costs: Costs,
        num_speculative_tokens: int,
        *,
        name: str = DECODE,
        stages: int = 1,
        chunks: Sequence[int] = (),
    ):
        self.all, self.stages, self._speculative, self._chunks = costs, stages, num_speculative_tokens, chunks
        self._name, self._sizes = name, {} if name == DECODE else {"chunks": 0}

    def record(self, bucket: Bucket, seconds: float, *, plain: int, speculative: int, at_most: bool = False) -> None:
        """Record a step of `plain` and `speculative` passes, made by the decode program of this bucket.

        There are no passes if all rows had ended in the step before: its time says nothing. at_most: as in `Costs`.
        """
        sizes = dict(bucket) | {"speculative": 0}
        if plain and not speculative:
            self.all.record(self._name, tuple(sizes.items()), seconds, passes=plain, at_most=at_most)
        elif speculative and not plain:
            self.all.record(self._name, bucket, seconds, passes=speculative, at_most=at_most)
        # With more plain passes, too little time would be left to attribute.
        elif 0 < plain <= speculative and (mean := self.all.mean(self._name, **sizes)):
            # A speculative pass does all that a plain one does.
            rest = max(seconds - plain * mean, speculative * mean)
            self.all.record(self._name, bucket, rest, passes=speculative, at_most=at_most)

    def seconds(self, rows: int, micro_batches: int = 1) -> float | None:
        """The seconds of a plain pass, or of a speculative one if no plain one is known; None if none is.

        micro_batches: in which the rows go through the stages of a pipeline.
        """
        return self._mean(rows, 0, micro_batches) or self._mean(rows, self._speculative, micro_batches)

    def chunk_seconds(self) -> float | None:
        """The fewest seconds that a chunk of a prompt takes, of the known sizes of steps; None if none is known."""
        name = PREFILL if self._name == DECODE else self._name
        return min((s / n for n in self._chunks if (s := self.all.mean(name, chunks=n)) is not None), default=None)

    def prefill_seconds(self, chunks: int) -> float | None:
        """The seconds of so many chunks of a prompt, in as many steps as they take; None if no size is known."""
        name = PREFILL if self._name == DECODE else self._name
        known = {n: seconds for n in self._chunks if (seconds := self.all.mean(name, chunks=n)) is not None}
        if not known:
            return None
        best = min(known, key=lambda size: known[size] / size)
        full, rest = divmod(chunks, best)
        return full * known[best] + min(-(-rest // size) * seconds for size, seconds in known.items())

    def micro_batches(self, rows: int) -> int:
        """Return in how many micro-batches rows go through the stages of a pipeline the fastest.

        One for each stage hides the way of the tokens back. But a part of the rows may take as long as all of them,
        whose pass reads as many weights; so both are tried, and the record decides.
        """
        if self.stages == 1 or rows == 1:
            return 1
        ways, kinds = (self.stages, 1), sorted({0, self._speculative})
        costs = {
            kind: [self.all.for_sizes(self._name, **self._sizes_of(rows, kind, way)) for way in ways] for kind in kinds
        }
        for way, known in zip(ways, zip(*costs.values(), strict=True), strict=True):
            if sum(cost.weight for cost in known if cost) < TRIES:
                return way
        for divided, together in costs.values():  # passes of one kind are compared
            if divided and together:
                return self.stages if divided.p50 <= together.p50 else 1
        return self.stages

    def ratio(self, rows: int) -> float:
        """Return how much longer a speculative pass takes than a plain one."""
        micro_batches = self.micro_batches(rows)
        plain, speculative = (self._mean(rows, count, micro_batches) for count in (0, self._speculative))
        return UNKNOWN_COST if plain is None or speculative is None else max(1.0, speculative / plain)

    def _mean(self, rows: int, speculative: int, micro_batches: int) -> float | None:
        return self.all.mean(self._name, **self._sizes_of(rows, speculative, micro_batches))

    def _sizes_of(self, rows: int, speculative: int, micro_batches: int) -> dict[str, int]:
        """The sizes of a decode pass in the record."""
        sizes = self._sizes | {"batch": micro_batches * -(-rows // micro_batches), "speculative": speculative}
        return sizes | ({"micro_batches": micro_batches} if self.stages > 1 else {})
