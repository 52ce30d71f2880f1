"""The setting: the committed tasks, their batch times here, and the images that each level gets right."""

import dataclasses
import functools
import gzip
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.otas.infaas import as_levels, seconds_to_load
from benchmarks.report import ROOT
from examples.train_elastic_vit import SIZES
from jaxinfer.elastic import Dataset, Service, load_dataset
from jaxinfer.elastic.scheduling.policies import POLICIES, ModelSwitching, Policy, make_policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.evaluation.elastic.measurements import Measurements, measure
from jaxinfer.evaluation.elastic.simulator import ServedTrace
from jaxinfer.evaluation.elastic.workloads import ARRIVALS, QueryKind, arrivals_at, table_ii

BACKBONE, DATA = ROOT / "examples" / "elastic_vit", ROOT / "benchmarks" / "data"
TASKS = ("digits", "mnist", "textures")
"""Tasks in place of CIFAR-10, CIFAR-100 and EuroSAT."""
INFAAS = "infaas"
OURS = "elastic"
BY_WORTH = ", by worth"
"""Ending of the name of a policy that batches as `elastic` does, and not as in the paper."""


class Swing(NamedTuple):
    """Arrivals at two loads in turn.

    Attributes:
      low: the lower load, which comes first, as a multiple of the capacity at level 0.
      high: the higher load.
      seconds: duration of each, in the paper's seconds.
    """

    low: float
    high: float
    seconds: float

    @property
    def mean(self) -> float:
        """The mean load."""
        return round((self.low + self.high) / 2, 3)


SWINGS = {
    "swinging": Swing(0.3, 1.6, 20.0),
    **{f"swings of {seconds} s": Swing(0.5, 1.6, float(seconds)) for seconds in (2, 5, 20)},
}
"""The swinging arrivals by trace."""
LONGER = {"swinging": 4, "swings of 5 s": 2, "swings of 20 s": 4}
"""Factors on the number of queries of some traces, to see several swings."""

FAR_SHARE, FAR_SECONDS = 0.003, 60.0
"""Share of the queries with far deadlines, and their deadline in the paper's seconds."""
TABLE_II, EQUAL_WORTH, FAR_DEADLINES = "table II", "equal worth", "far deadlines"
MIXES: Mapping[str, list[QueryKind]] = {
    TABLE_II: table_ii(TASKS),
    EQUAL_WORTH: [dataclasses.replace(kind, utility=1.0) for kind in table_ii(TASKS)],
    FAR_DEADLINES: [
        *(dataclasses.replace(kind, share=1 - FAR_SHARE) for kind in table_ii(TASKS)),
        *(dataclasses.replace(kind, latency=FAR_SECONDS, share=FAR_SHARE) for kind in table_ii(TASKS)),
    ],
}
"""Kinds of queries by mix."""


class Cell(NamedTuple):
    """A condition under which policies are compared.

    Attributes:
      trace: the kind of arrivals.
      load: arrival rate as a multiple of the capacity at level 0.
      mix: one of `MIXES`.
    """

    trace: str
    load: float
    mix: str = TABLE_II

    def __str__(self) -> str:
        return f"{self.trace} {self.load}x" + (f", {self.mix}" if self.mix != TABLE_II else "")


class Setting(NamedTuple):
    """The measurements that policies are compared on.

    Attributes:
      levels: the backbone's levels.
      models: three sizes in place of levels, the backbone in the middle.
      load_seconds: seconds to load each of them.
      tests: images of each task that nothing was trained on.
    """

    levels: Measurements
    models: Measurements
    load_seconds: Mapping[int, float]
    tests: Mapping[str, Dataset]

    @property
    def policies(self) -> list[str]:
        """The policies that adapt, PetS, INFaaS, and the other fixed levels; each batches as in the paper."""
        fixed = (level for level in self.levels.profile.levels if level)
        return [*POLICIES, INFAAS, *(f"level{level:+d}" for level in fixed)]

    @property
    def contenders(self) -> list[str]:
        """The policies, and each again with the batching of `elastic`."""
        return [*self.policies, *(f"{name}{BY_WORTH}" for name in self.policies if name != OURS)]

    def row(self) -> dict[str, Any]:
        """The row of a result that holds the measured figures."""
        levels, models = self.levels, self.models
        return {
            "figure": "setting",
            "capacity": round(levels.capacity, 1),
            "latency_scale": round(levels.scale, 4),
            "seconds": {f"{n} {b}": round(s, 5) for (n, b), s in levels.profile.seconds.items()},
            "accuracy": {f"{task} {n}": round(float(right.mean()), 4) for (task, n), right in levels.right.items()},
            "model_capacity": [round(models.profile.capacity(n), 1) for n in models.profile.levels],
            "model_accuracy": {
                f"{task} {n}": round(float(right.mean()), 4) for (task, n), right in models.right.items()
            },
            "load_seconds": [round(s, 4) for s in self.load_seconds.values()],
        }

    def make(self, policy: str) -> Policy:
        """Make one of `contenders`, at this device's pace."""
        if is_infaas(policy):
            usual = make_contender(policy.replace(INFAAS, "pets"), self.levels.profile, scale=self.levels.scale)
            return ModelSwitching(self.models.profile, self.load_seconds, usual.batching)
        return make_contender(policy, self.levels.profile, scale=self.levels.scale)

    def queries(self, cell: Cell, *, seed: int, count: int) -> list[Query]:
        """Draw about `count` queries of a cell, in the paper's mix. The seed draws them, the same for all policies."""
        rate, measured = cell.load * self.levels.capacity, self.levels
        count *= LONGER.get(cell.trace, 1)
        arrivals = arrivals_at(TRACES[cell.trace], rate, count / rate, seed=seed, scale=measured.scale)
        return measured.queries(arrivals, seed=seed, kinds=MIXES[cell.mix])

    def simulate(self, queries: Sequence[Query], policy: str, *, seed: int) -> ServedTrace:
        """Serve queries once on a simulated clock; the seed draws the seconds of batches."""
        measured = self.models if is_infaas(policy) else self.levels
        served = measured.simulate(queries, self.make(policy), seed=seed)
        return ServedTrace(answers=served.answers, best=self.levels.best(queries))


def is_infaas(policy: str) -> bool:
    """Whether a policy chooses models and not levels, whichever way it batches."""
    return policy.removesuffix(BY_WORTH) == INFAAS


def make_contender(name: str, profile: ServingProfile, *, scale: float = 1.0) -> Policy:
    """Make a policy whose name may end in `BY_WORTH`. For the arguments see `make_policy`."""
    return make_policy(name.removesuffix(BY_WORTH), profile, scale=scale, by_worth=name.endswith(BY_WORTH))


def best_fixed(utilities: Mapping[str, float], ending: str = "") -> str:
    """Find the fixed level of the highest utility among the policies with this ending of their names."""
    plain = {name.removesuffix(ending): value for name, value in utilities.items() if name.endswith(ending)}
    fixed = [name for name in plain if re.fullmatch(r"level[+-]\d+|pets", name)]
    return max(fixed, key=plain.__getitem__) + ending


def measure_setting() -> Setting:
    """Time batches and loads, and classify all test images, at all levels and with all models."""
    service = Service.from_checkpoint(BACKBONE)
    size = service.config.image_size
    tests = {name: service.task(name).divide(load_dataset(name, size)).test for name in TASKS}
    levels = measure(service, tests)
    models, load_seconds = [], {}
    for index, name in enumerate(SIZES):
        folder = BACKBONE if name == "base" else DATA / f"{BACKBONE.name}_{name}"
        small = None if folder == BACKBONE else Service.from_checkpoint(folder, merge_levels=())
        models.append(levels if small is None else measure(small, tests, levels=[0]))
        load_seconds[index] = seconds_to_load(folder)
    return Setting(levels, as_levels(models), load_seconds, tests)


def azure_arrivals(name: str, rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Cut arrivals from the Azure LLM inference trace 2023 ("code" or "conv") at a random place, sped up."""
    with gzip.open(DATA / f"azure_llm_2023_{name}.txt.gz", "rt") as file:
        times = np.cumsum([int(line) for line in file if not line.startswith("#")]) / 1000
    count = round(rate * seconds)
    repeats = -(-2 * count // len(times))
    times = np.concatenate([times + k * (times[-1] + 1.0) for k in range(repeats)])
    first = int(np.random.default_rng((seed, 5)).integers(len(times) - count))
    part = times[first : first + count]
    return (part - part[0]) * (seconds / (part[-1] - part[0]))


def swinging_arrivals(rate: float, seconds: float, *, seed: int, swing: Swing) -> np.ndarray:
    """Draw Poisson arrivals at a swing's loads in turn, which are multiples of the capacity if `rate` is their mean."""
    rng, arrived = np.random.default_rng((seed, 6)), []
    for place, begin in enumerate(np.arange(0.0, seconds, swing.seconds)):
        length = min(swing.seconds, seconds - begin)
        now = rate * (swing.low, swing.high)[place % 2] / swing.mean
        arrived.append(begin + length * np.sort(rng.random(rng.poisson(now * length))))
    return np.concatenate(arrived)


TRACES: dict[str, Callable[..., np.ndarray]] = {
    **ARRIVALS,
    **{trace: functools.partial(swinging_arrivals, swing=swing) for trace, swing in SWINGS.items()},
    "azure code": lambda rate, seconds, *, seed: azure_arrivals("code", rate, seconds, seed=seed),
    "azure conv": lambda rate, seconds, *, seed: azure_arrivals("conv", rate, seconds, seed=seed),
}
