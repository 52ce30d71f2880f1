"""What programs cost: their times, in one record that every controller reads and that outlives the process."""

import atexit
import dataclasses
import hashlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Self

import jax
import msgspec
import numpy as np

from jaxinfer.compiled.origin import Origin
from jaxinfer.compiled.program import Bucket
from jaxinfer.disk_cache import KeptFiles, cache_folder

log = logging.getLogger(__name__)

RESOLUTION = 1.05
"""The ratio of neighbouring times in a histogram: a percentile is off by at most half a step, 2.5%."""
_LOG_RESOLUTION = math.log(RESOLUTION)
SHORTEST = 1e-9
"""Seconds that a call counts as at least, since a simulated clock can stand still."""
STALL = 8.0
"""A call that took more than this many times the mean met a stall of the machine: the mean counts it as this many."""
MAX_CALLS = 256
"""How many calls a record keeps. When it has them, all weigh half from then on, so that new ones tell."""
PRIOR_CALLS = 16
"""How many calls all earlier processes count as, so that a machine that has become slower is soon learnt anew."""
SAVE_SECONDS = 60.0
"""How often a process that goes on writes down what it has learnt; one that ends always does."""
LOCK_SECONDS = 5.0
MAX_BYTES = 64 << 20
"""Of all records on disk together; what was used longest ago is deleted first."""
FORMAT = 2
LONGEST = 1e9
"""Seconds of a call that a record on disk can have; more is damage."""


Key = tuple[str, Bucket]
"""A program's name, or that of anything else that takes time by its sizes, and the sizes."""


@dataclasses.dataclass(kw_only=True)
class Cost:
    """What calls at some sizes were seen to take: seconds of a pass through the model, each call counting once.

    Of the calls there ever were, the newest count (`MAX_CALLS`). Percentiles are those of `numpy.percentile` with
    method "inverted_cdf" within 2.5%: calls are counted in a histogram whose steps are 5% apart.

    Attributes:
      calls: how many there ever were.
      passes: through the model, in all of them.
      seconds: the sum over calls that still count; a stall counts as `STALL` times the mean before it.
      counts: how many of these took RESOLUTION ** key seconds.
    """

    calls: int = 0
    passes: int = 0
    seconds: float = 0.0
    counts: dict[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._weight = sum(self.counts.values())

    @property
    def weight(self) -> float:
        """How many calls still count; what was forgotten in part is a fraction."""
        return self._weight

    @property
    def mean(self) -> float:
        """Seconds a pass."""
        return self.seconds / self._weight

    @property
    def p50(self) -> float:
        """Half the calls took at most this long."""
        return self.percentile(50)

    @property
    def p95(self) -> float:
        """All but a twentieth of the calls took at most this long."""
        return self.percentile(95)

    def percentile(self, percent: float) -> float:
        """Seconds that `percent` of the calls did not exceed."""
        rank, bins = percent / 100 * self._weight, sorted(self.counts)
        below = itertools.accumulate(self.counts[at] for at in bins)
        # Sums of fractions may end just below the rank that they should reach.
        return RESOLUTION ** next((at for at, n in zip(bins, below, strict=True) if n >= rank - 1e-6), bins[-1])

    def add(self, seconds: float, passes: int, counted: float) -> None:
        """Count a call.

        Args:
          seconds: of one of its passes, on average; > 0.
          passes: how many it had.
          counted: what the mean takes instead.
        """
        if self._weight >= MAX_CALLS:
            self.forget(MAX_CALLS / 2)
        at = _bin(seconds)
        self.counts[at] = self.counts.get(at, 0.0) + 1
        self._weight += 1
        self.seconds += counted
        self.calls += 1
        self.passes += passes

    def forget(self, limit: float) -> None:
        """Let all calls weigh less, as many as `limit` together, if they weigh more."""
        if self._weight > limit:
            share = max(limit, 0.0) / self._weight
            self.counts = {at: n * share for at, n in self.counts.items() if n * share > 1e-3}
            self.seconds *= share
            self._weight = sum(self.counts.values())

    def copy(self) -> "Cost":
        """The same, which later calls do not change."""
        return dataclasses.replace(self, counts=dict(self.counts))

    def merge(self, other: "Cost") -> None:
        """Count the calls of `other` too."""
        for at, n in other.counts.items():
            self.counts[at] = self.counts.get(at, 0.0) + n
        self._weight += other.weight
        self.seconds += other.seconds
        self.calls += other.calls
        self.passes += other.passes


def _bin(seconds: float) -> int:
    """The step of a histogram that counts calls of so many seconds."""
    return round(math.log(seconds) / _LOG_RESOLUTION)


class LinearFit(NamedTuple):
    """Seconds as a line over a size, `slope * size + intercept`, by least squares.

    Attributes:
      slope: seconds for one more.
      intercept: seconds for none.
      r2: the part of the variance that the line explains; 1 where there is none.
      points: sizes that it goes through, at least 2.
    """

    slope: float
    intercept: float
    r2: float
    points: int

    @classmethod
    def through(cls, sizes: Sequence[int], seconds: Sequence[float], weights: Sequence[float] | None = None) -> Self:
        """The line through at least two different sizes; weights: how much each point counts, None: all as much."""
        x, y = np.array(sizes, float), np.array(seconds)
        mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
        dx, dy = x - mean_x, y - mean_y
        slope = np.average(dx * dy, weights=weights) / np.average(dx**2, weights=weights)
        rest, variance = np.average((dy - slope * dx) ** 2, weights=weights), np.average(dy**2, weights=weights)
        r2 = 1 - rest / variance if variance else 1.0
        return cls(float(slope), float(mean_y - slope * mean_x), float(r2), len(sizes))


class CostTable:
    """What programs cost, to plan by.

    Args:
      costs: by program and sizes.
    """

    def __init__(self, costs: Mapping[Key, Cost]):
        self._costs = dict(costs)
        self._matching: dict[tuple[str, frozenset[tuple[str, int]]], list[Cost]] = {}

    def of(self, name: str, /, **sizes: int) -> Cost | None:
        """What calls of these sizes took, all other sizes together; None if there were none."""
        total = Cost()
        for cost in self._match(name, sizes):
            total.merge(cost)
        return total if total.calls else None

    def mean(self, name: str, /, **sizes: int) -> float | None:
        """The mean of `of`, for callers in a hurry."""
        matching = self._match(name, sizes)
        weight = sum(cost.weight for cost in matching)
        return sum(cost.seconds for cost in matching) / weight if weight else None

    def fit(
        self, name: str, over: str, by: Literal["mean", "p50", "p95"] = "mean", /, **sizes: int
    ) -> LinearFit | None:
        """A line through a program's costs over one of its sizes; each cost weighs as many calls as it has.

        Args:
          name: of the program.
          over: the size.
          by: which of a cost's times.
          sizes: those that are held; others are taken together.
        Returns None unless the costs of two different sizes are known.
        """
        known = sorted({dict(bucket)[over] for n, bucket in self._costs if n == name and over in dict(bucket)})
        costs = {size: cost for size in known if (cost := self.of(name, **sizes, **{over: size}))}
        if len(costs) < 2:
            return None
        return LinearFit.through(
            list(costs), [getattr(cost, by) for cost in costs.values()], [cost.weight for cost in costs.values()]
        )

    def _match(self, name: str, sizes: Mapping[str, int]) -> list[Cost]:
        key = name, frozenset(sizes.items())
        if key not in self._matching:
            self._matching[key] = [
                self._costs[n, bucket] for n, bucket in self._costs if n == name and key[1] <= {*bucket}
            ]
        return self._matching[key]


class _Entry(msgspec.Struct):
    name: str
    sizes: dict[str, int]
    cost: Cost

    def __post_init__(self) -> None:
        cost = self.cost
        positive = cost.calls, cost.passes, cost.seconds, *cost.counts.values()
        bins = range(_bin(SHORTEST), _bin(LONGEST) + 1)
        if not cost.counts or not all(0 < x < LONGEST**2 for x in positive) or cost.counts.keys() - set(bins):
            raise ValueError(f"no times for {self.name} {self.sizes}")


class KeptCosts(msgspec.Struct, kw_only=True):
    """The costs of one model on one kind of device under one version of JAX, as they are kept in a file.

    Attributes:
      device: the kind of device.
      jax: its version, and XLA's flags where the environment has some.
      model: all else that decides how long programs take, by name.
      programs: the costs at all sizes.
    """

    device: str
    jax: str
    model: dict[str, str]
    programs: list[_Entry] = []

    @property
    def costs(self) -> dict[Key, Cost]:
        """The costs by program and sizes."""
        return {(entry.name, tuple(entry.sizes.items())): entry.cost for entry in self.programs}


class CostFile:
    """Where the costs of one model on one kind of device are kept; several processes may add to it at a time."""

    def __init__(self, device: str, model: Mapping[str, str]):
        self._key = KeptCosts(device=device, jax=_jax_version(), model=dict(model))
        self._name = hashlib.sha256(msgspec.json.encode([FORMAT, self._key], order="sorted")).hexdigest()[:16]
        self._files = _files()

    def read(self) -> dict[Key, Cost]:
        """The costs that the file has; none if there is no file, or a damaged one."""
        kept = _read(self._files, self._name)
        return kept.costs if kept else {}

    def add(self, new: Mapping[Key, Cost], replaced: Collection[Key] = ()) -> None:
        """Add calls to what the file has, or put them in its place. Raises OSError if that fails."""
        with self._files.locked(seconds=LOCK_SECONDS):
            costs = self.read()
            for key in replaced:
                costs.pop(key, None)
            for key, cost in new.items():
                _displace(costs.setdefault(key, Cost()), cost)
            entries = [_Entry(name, dict(bucket), cost) for (name, bucket), cost in costs.items()]
            self._files.write(self._name, msgspec.json.encode(msgspec.structs.replace(self._key, programs=entries)))


def kept_costs(device: str) -> Iterator[KeptCosts]:
    """What is kept for a kind of device, under this version of JAX."""
    files = _files()
    for name in sorted(files.sizes()):
        kept = _read(files, name)
        if kept and (kept.device, kept.jax) == (device, _jax_version()):
            yield kept


def _files() -> KeptFiles:
    return KeptFiles(cache_folder() / "costs", max_bytes=MAX_BYTES)


def _read(files: KeptFiles, name: str) -> KeptCosts | None:
    """A record, or None; what is damaged is deleted."""
    if (content := files.get(name)) is None:
        return None
    try:
        return msgspec.json.decode(content, type=KeptCosts)
    except msgspec.MsgspecError as error:
        log.warning("%s is damaged and not used: %s", files.folder / name, error)
        files.remove(name)
        return None


def _jax_version() -> str:
    return " ".join([jax.__version__, *os.environ.get("XLA_FLAGS", "").split()])


def _displace(old: Cost, new: Cost) -> None:
    """Count the calls of `new` too, in place of old ones where both are too many."""
    old.forget(MAX_CALLS - new.weight)
    old.merge(new)


class _Times:
    """The times of one program: all that count, and those since the last time that they were saved.

    replaces: whether those that were saved before count no more.
    """

    def __init__(self, cost: Cost, *, called: bool = False, replaces: bool = False):
        self.cost, self.unsaved, self.called, self.replaces = cost, Cost(), called, replaces

    def record(self, seconds: float, passes: int) -> None:
        counted = min(seconds, STALL * self.cost.mean) if self.cost.weight else seconds
        self.cost.add(seconds, passes, counted)
        self.unsaved.add(seconds, passes, counted)


class Costs:
    """What programs cost: of one model, on one kind of device, under one version of JAX.

    A time goes from dispatch, or from when the results of the step before were on the host if that came later, to the
    results on the host. Compiling, and packing the inputs, are not in it; the small programs that change the state
    between two steps are. Where steps overlap, a host that notices results late makes one step too long and the next
    one too short: `mean` is right then, percentiles are what the host saw. The first call of a program in a process
    is not counted: it sets up what later calls find.

    What earlier processes learnt is read once, at the start (the prior), and counts as `PRIOR_CALLS` calls. Threads
    may share one. Who plans by many of them takes a `snapshot`.

    Args:
      known: the costs to begin with.
      learns: whether calls are counted; else `known` stays as it is.
      file: where calls are added by `save`; None: nowhere.
    """

    def __init__(self, known: Mapping[Key, Cost] | None = None, *, learns: bool = True, file: CostFile | None = None):
        self._learns, self._file = learns, file
        self._programs = {key: _Times(cost) for key, cost in (known or {}).items()}
        self._table = CostTable(known or {})  # of the same costs, as they change
        self._saved = time.monotonic()
        self._lock = threading.Lock()
        self._origin = Origin("This record of costs")

    @classmethod
    def open(cls, *, device: str, model: Mapping[str, str]) -> Self:
        """The costs that are kept on disk, where what this process learns is added, at its end at the latest.

        Args:
          device: the kind of device, so that programs take equally long on all that it names.
          model: all else that decides how long programs take, by name: config, weight format, mesh, ...
        """
        file = CostFile(device, model)
        known = file.read()
        for cost in known.values():
            cost.forget(PRIOR_CALLS)
        costs = cls(known, file=file)
        atexit.register(costs.save)
        return costs

    @classmethod
    def fixed(cls, seconds: Mapping[Key, float]) -> Self:
        """A record of these seconds a pass which learns nothing, so that what is decided by it does not vary."""
        known = {key: Cost() for key in seconds}
        for key, cost in known.items():
            cost.add(seconds[key], 1, seconds[key])
        return cls(known, learns=False)

    def record(self, name: str, bucket: Bucket, seconds: float, *, passes: int = 1) -> None:
        """Count a call.

        Args:
          name: of the program.
          bucket: its sizes.
          seconds: of the whole call.
          passes: through the model in it.
        """
        if not self._learns:
            return
        with self._lock:
            program = self._programs.get((name, bucket))
            if program is None:
                program = self._programs[name, bucket] = _Times(Cost())
                self._renew_table()
            if program.called:
                program.record(max(seconds / passes, SHORTEST), passes)
            program.called = True

    def replace(self, name: str, bucket: Bucket, seconds: Iterable[float]) -> None:
        """Let these calls, the first one included, take the place of all that were before, in the file too."""
        if not self._learns:
            return
        times = _Times(Cost(), called=True, replaces=True)
        for one in seconds:
            times.record(max(one, SHORTEST), 1)
        with self._lock:
            self._programs[name, bucket] = times
            self._renew_table()

    def of(self, name: str, /, **sizes: int) -> Cost | None:
        """What calls of these sizes took, all other sizes together; None if there were none."""
        with self._lock:
            return self._table.of(name, **sizes)

    def mean(self, name: str, /, **sizes: int) -> float | None:
        """The mean of `of`, for callers in a hurry."""
        with self._lock:
            return self._table.mean(name, **sizes)

    def snapshot(self) -> CostTable:
        """All costs as they are now."""
        with self._lock:
            return CostTable({key: program.cost.copy() for key, program in self._programs.items()})

    def _renew_table(self) -> None:
        self._table = CostTable({key: program.cost for key, program in self._programs.items()})

    def save(self, *, every: float = 0.0) -> None:
        """Add what was learnt since the last time to the file, unless that is less than `every` seconds ago.

        A folder that cannot be written to, or is full, is no error: what was learnt is kept for the next time. What a
        forked process has, it has learnt in its parent, which adds it.
        """
        if self._file is None or self._origin.forked or time.monotonic() - self._saved < every:
            return
        with self._lock:
            self._saved = time.monotonic()
            new = {key: program.unsaved for key, program in self._programs.items() if program.unsaved.calls}
            replaced = {key for key in new if self._programs[key].replaces}
            for key in new:
                self._programs[key].unsaved, self._programs[key].replaces = Cost(), False
        if not new:
            return
        try:
            self._file.add(new, replaced)
        except OSError as error:
            log.info("Measured costs are not kept: %s", error)
            with self._lock:
                for key, cost in new.items():
                    _displace(cost, self._programs[key].unsaved)
                    self._programs[key].unsaved = cost
                    self._programs[key].replaces |= key in replaced
