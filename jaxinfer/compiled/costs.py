"""Costs of programs: their times, in one record that every controller reads and that outlives the process."""

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
"""The ratio of neighbouring bins in a histogram: a percentile is off by at most half a step, 2.5%."""
_LOG_RESOLUTION = math.log(RESOLUTION)
SHORTEST = 1e-9
"""Fewest seconds that a call counts as, since a simulated clock can stand still."""
STALL = 8.0
"""A call that took more than this many times the mean met a stall of the machine: the mean counts it as this many."""
MAX_CALLS = 256
"""How many calls a record keeps. A full record is first scaled down to half, so that new calls have an effect."""
PRIOR_CALLS = 16
"""How many calls all earlier processes count as, so that a machine that became slower is soon measured as such."""
SAVE_SECONDS = 60.0
"""Seconds between two saves of a process that goes on; one that ends always saves."""
LOCK_SECONDS = 5.0
MAX_BYTES = 64 << 20
"""Limit for all records on disk together; the least recently used are deleted first."""
FORMAT = 2
LONGEST = 1e9
"""Most seconds that a call in a record on disk can have; more is damage."""


Key = tuple[str, Bucket]
"""The name of a program, or of anything else that takes time by its sizes, and the sizes."""


@dataclasses.dataclass(kw_only=True)
class Cost:
    """Measured times of calls at some sizes: seconds of a pass through the model, each call counting once.

    Only the newest `MAX_CALLS` calls count. Percentiles are those of `numpy.percentile` with method "inverted_cdf"
    within 2.5%: calls are counted in a histogram whose steps are 5% apart.

    Attributes:
      calls: the number of calls ever made.
      passes: passes through the model in all of them.
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
        """The number of calls that still count; calls that were scaled down count as fractions."""
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
        """Compute the seconds that `percent` of the calls did not exceed."""
        rank, bins = percent / 100 * self._weight, sorted(self.counts)
        below = itertools.accumulate(self.counts[at] for at in bins)
        # Sums of fractions may end just below the rank that they should reach.
        return RESOLUTION ** next((at for at, n in zip(bins, below, strict=True) if n >= rank - 1e-6), bins[-1])

    def add(self, seconds: float, passes: int, counted: float) -> None:
        """Count a call.

        Args:
          seconds: the average of its passes; > 0.
          passes: the number of its passes.
          counted: the seconds that the mean takes instead.
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
        """Scale the histogram down to a total weight of at most `limit`."""
        if self._weight > limit:
            share = max(limit, 0.0) / self._weight
            self.counts = {at: n * share for at, n in self.counts.items() if n * share > 1e-3}
            self.seconds *= share
            self._weight = sum(self.counts.values())

    def copy(self) -> "Cost":
        """A copy, which later calls do not change."""
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
    """Find the histogram bin of a call that takes this long."""
    return round(math.log(seconds) / _LOG_RESOLUTION)


class LinearFit(NamedTuple):
    """Seconds as a line over a size, `slope * size + intercept`, by least squares.

    Attributes:
      slope: seconds for one more.
      intercept: seconds for none.
      r2: the share of the variance that the line explains; 1 without variance.
      points: the number of sizes it goes through, at least 2.
    """

    slope: float
    intercept: float
    r2: float
    points: int

    @classmethod
    def through(cls, sizes: Sequence[int], seconds: Sequence[float], weights: Sequence[float] | None = None) -> Self:
        """Fit a line to at least two different sizes; weights: how much each point counts, None: all the same."""
        x, y = np.array(sizes, float), np.array(seconds)
        mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
        dx, dy = x - mean_x, y - mean_y
        slope = np.average(dx * dy, weights=weights) / np.average(dx**2, weights=weights)
        rest, variance = np.average((dy - slope * dx) ** 2, weights=weights), np.average(dy**2, weights=weights)
        r2 = 1 - rest / variance if variance else 1.0
        return cls(float(slope), float(mean_y - slope * mean_x), float(r2), len(sizes))


class CostTable:
    """Costs of programs, for planning.

    Args:
      costs: by program and sizes.

    Attributes:
      costs: as given.
    """

    def __init__(self, costs: Mapping[Key, Cost]):
        self.costs = dict(costs)
        self._matching: dict[tuple[str, frozenset[tuple[str, int]]], list[Cost]] = {}

    def for_sizes(self, name: str, /, **sizes: int) -> Cost | None:
        """The cost of calls at these sizes, pooled over all other sizes; None if there were none."""
        total = Cost()
        for cost in self._match(name, sizes):
            total.merge(cost)
        return total if total.calls else None

    def mean(self, name: str, /, **sizes: int) -> float | None:
        """The mean of `for_sizes`, without the cost of merging histograms."""
        matching = self._match(name, sizes)
        weight = sum([cost.weight for cost in matching])
        return sum([cost.seconds for cost in matching]) / weight if weight else None

    def fit(
        self, name: str, over: str, by: Literal["mean", "p50", "p95"] = "mean", /, **sizes: int
    ) -> LinearFit | None:
        """Fit a line to a program's costs over one of its sizes; each cost is weighted by its number of calls.

        Args:
          name: the program.
          over: the size that varies.
          by: which of a cost's times.
          sizes: sizes that are fixed; costs are pooled over the others.

        Returns:
          The line, or None unless the costs of two different sizes are known.
        """
        known = sorted({dict(bucket)[over] for n, bucket in self.costs if n == name and over in dict(bucket)})
        costs = {size: cost for size in known if (cost := self.for_sizes(name, **sizes, **{over: size}))}
        if len(costs) < 2:
            return None
        return LinearFit.through(
            list(costs), [getattr(cost, by) for cost in costs.values()], [cost.weight for cost in costs.values()]
        )

    def _match(self, name: str, sizes: Mapping[str, int]) -> list[Cost]:
        key = name, frozenset(sizes.items())
        if key not in self._matching:
            self._matching[key] = [
                self.costs[n, bucket] for n, bucket in self.costs if n == name and key[1] <= {*bucket}
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
    """The costs of one model on one kind of device under one version of JAX, as a file holds them.

    Attributes:
      device: the kind of device.
      jax: its version, and XLA's flags if the environment has some.
      model: everything else that decides how long programs take, by name.
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
    """The file with the costs of one model on one kind of device; several processes may add to it at a time."""

    def __init__(self, device: str, model: Mapping[str, str]):
        self._key = KeptCosts(device=device, jax=_jax_version(), model=dict(model))
        self._name = hashlib.sha256(msgspec.json.encode([FORMAT, self._key], order="sorted")).hexdigest()[:16]
        self._files = _files()

    def read(self) -> dict[Key, Cost]:
        """Read the costs in the file; none if the file is missing or damaged."""
        kept = _read(self._files, self._name)
        return kept.costs if kept else {}

    def add(self, new: Mapping[Key, Cost], replaced: Collection[Key] = ()) -> None:
        """Add calls to those in the file, or replace those. Raises OSError if that fails."""
        with self._files.locked(seconds=LOCK_SECONDS):
            costs = self.read()
            for key in replaced:
                costs.pop(key, None)
            for key, cost in new.items():
                _displace(costs.setdefault(key, Cost()), cost)
            entries = [_Entry(name, dict(bucket), cost) for (name, bucket), cost in costs.items()]
            self._files.write(self._name, msgspec.json.encode(msgspec.structs.replace(self._key, programs=entries)))


def kept_costs(device: str) -> Iterator[KeptCosts]:
    """Yield the records of a kind of device, under this version of JAX."""
    files = _files()
    for name in sorted(files.sizes()):
        kept = _read(files, name)
        if kept and (kept.device, kept.jax) == (device, _jax_version()):
            yield kept


def _files() -> KeptFiles:
    return KeptFiles(cache_folder() / "costs", max_bytes=MAX_BYTES)


def _read(files: KeptFiles, name: str) -> KeptCosts | None:
    """Read a record; None without one. A damaged record is deleted."""
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
    """Count the calls of `new` too, in place of old ones if both together exceed `MAX_CALLS`."""
    old.forget(MAX_CALLS - new.weight)
    old.merge(new)


class _Times:
    """The times of one program: all that count, and those not saved yet.

    replaces: whether the unsaved times replace those saved before.
    """

    def __init__(self, cost: Cost, *, called: bool = False, replaces: bool = False):
        self.cost, self.unsaved, self.called, self.replaces = cost, Cost(), called, replaces

    def record(self, seconds: float, passes: int) -> None:
        counted = min(seconds, STALL * self.cost.mean) if self.cost.weight else seconds
        self.cost.add(seconds, passes, counted)
        self.unsaved.add(seconds, passes, counted)


class Costs:
    """The costs of one model's programs, on one kind of device, under one version of JAX.

    A time goes from dispatch, or from when the previous step's results were on the host if that was later, to the
    results on the host. It excludes compiling and packing the inputs; it includes the small programs that change the
    state between two steps. A host that comes late for the results, since it did something else, knows only what the
    time was at most. The first call of a program in a process is not counted: it does the set-up for later calls.

    Costs of earlier processes (the prior) are read once, at the start, and count as `PRIOR_CALLS` calls. Threads may
    share one. A planner that reads many of them takes a `snapshot`.

    Args:
      known: the initial costs.
      learns: whether calls are counted; else `known` stays as it is.
      file: where `save` adds calls; None: nowhere.
    """

    def __init__(self, known: Mapping[Key, Cost] | None = None, *, learns: bool = True, file: CostFile | None = None):
        self._learns, self._file = learns, file
        self._programs = {key: _Times(cost) for key, cost in (known or {}).items()}
        self._table = CostTable(known or {})  # views the live costs
        self._saved = time.monotonic()
        self._lock = threading.Lock()
        self._origin = Origin("This record of costs")

    @classmethod
    def open(cls, *, device: str, model: Mapping[str, str]) -> Self:
        """Open the costs on disk; what this process learns is added to them, at its end at the latest.

        Args:
          device: the kind of device, so that programs take equally long on all that it names.
          model: everything else that decides how long programs take, by name: config, weight format, mesh, ...
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
        """Make a record of these seconds a pass that learns nothing, so that decisions by it do not vary."""
        known = {key: Cost() for key in seconds}
        for key, cost in known.items():
            cost.add(seconds[key], 1, seconds[key])
        return cls(known, learns=False)

    def record(self, name: str, bucket: Bucket, seconds: float, *, passes: int = 1, at_most: bool = False) -> None:
        """Count a call.

        Args:
          name: the program.
          bucket: its sizes.
          seconds: the time of the whole call.
          passes: passes through the model in it.
          at_most: whether it took so long at most, since nobody waited for its end: above the mean, that says nothing.
        """
        if not self._learns:
            return
        with self._lock:
            program = self._programs.get((name, bucket))
            if program is None:
                program = self._programs[name, bucket] = _Times(Cost())
                self._renew_table()
            each = max(seconds / passes, SHORTEST)
            if program.called and not (at_most and program.cost.weight and each > program.cost.mean):
                program.record(each, passes)
            program.called = True

    def replace(self, name: str, bucket: Bucket, seconds: Iterable[float]) -> None:
        """Replace all earlier calls by these, the first one included, in the file too."""
        if not self._learns:
            return
        times = _Times(Cost(), called=True, replaces=True)
        for duration in seconds:
            times.record(max(duration, SHORTEST), 1)
        with self._lock:
            self._programs[name, bucket] = times
            self._renew_table()

    def for_sizes(self, name: str, /, **sizes: int) -> Cost | None:
        """The cost of calls at these sizes, pooled over all other sizes; None if there were none."""
        with self._lock:
            return self._table.for_sizes(name, **sizes)

    def mean(self, name: str, /, **sizes: int) -> float | None:
        """The mean of `for_sizes`, without the cost of merging histograms."""
        with self._lock:
            return self._table.mean(name, **sizes)

    def snapshot(self) -> CostTable:
        """Copy all costs as they are now."""
        with self._lock:
            return CostTable({key: program.cost.copy() for key, program in self._programs.items()})

    def _renew_table(self) -> None:
        self._table = CostTable({key: program.cost for key, program in self._programs.items()})

    def save(self, *, every: float = 0.0) -> None:
        """Add what was learnt since the last save to the file, unless that is less than `every` seconds ago.

        A folder that is full or cannot be written to is no error: what was learnt is kept for the next save. A forked
        process saves nothing: it has its parent's calls, which the parent saves.
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
