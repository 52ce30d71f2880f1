"""The setting: the committed tasks, their batch times here, and the images that each level gets right."""

import dataclasses
import gzip
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.otas.infaas import as_levels, seconds_to_load
from benchmarks.report import ROOT
from examples.train_elastic_vit import SIZES
from jaxinfer.elastic import Dataset, Service, load_dataset
from jaxinfer.elastic.scheduling.policies import POLICIES, ModelSwitching, Policy, make_policy
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.evaluation.elastic.measurements import Measurements, measure
from jaxinfer.evaluation.elastic.simulator import Served
from jaxinfer.evaluation.elastic.workloads import ARRIVALS, QueryKind, arrivals_at, table_ii

BACKBONE, DATA = ROOT / "examples" / "elastic_vit", ROOT / "benchmarks" / "data"
TASKS = ("digits", "mnist", "textures")
"""Tasks in place of CIFAR-10, CIFAR-100 and EuroSAT."""
INFAAS = "infaas"
LOW, HIGH, SWING_SECONDS = 0.3, 1.6, 20.0
"""The two loads of swinging arrivals, and the duration of each in the paper's seconds."""
LONGER = {"swinging": 4}
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
        """The policies that adapt, PetS, INFaaS, and the other fixed levels."""
        fixed = (level for level in self.levels.profile.levels if level)
        return [*POLICIES, INFAAS, *(f"level{level:+d}" for level in fixed)]

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
        """Make a policy by name, with the paper's batching at this device's pace."""
        if policy == INFAAS:
            usual = make_policy("pets", self.levels.profile, scale=self.levels.scale)
            return ModelSwitching(self.models.profile, self.load_seconds, usual.batching)
        return make_policy(policy, self.levels.profile, scale=self.levels.scale)

    def queries(self, cell: Cell, *, seed: int, count: int) -> list[Query]:
        """Draw about `count` queries of a cell, in the paper's mix. The seed draws them, the same for all policies."""
        rate, measured = cell.load * self.levels.capacity, self.levels
        count *= LONGER.get(cell.trace, 1)
        arrivals = arrivals_at(TRACES[cell.trace], rate, count / rate, seed=seed, scale=measured.scale)
        return measured.queries(arrivals, seed=seed, kinds=MIXES[cell.mix])

    def simulate(self, cell: Cell, policy: str, *, seed: int, count: int) -> Served:
        """Run once on a simulated clock."""
        measured, queries = self.models if policy == INFAAS else self.levels, self.queries(cell, seed=seed, count=count)
        served = measured.simulate(queries, self.make(policy), seed=seed)
        return Served(answers=served.answers, best=self.levels.best(queries))


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


def swinging_arrivals(rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Draw Poisson arrivals at `LOW` and `HIGH` in turn, as multiples of the capacity if `rate` is their mean."""
    rng, arrived = np.random.default_rng((seed, 6)), []
    for place, begin in enumerate(np.arange(0.0, seconds, SWING_SECONDS)):
        length = min(SWING_SECONDS, seconds - begin)
        now = rate * (LOW, HIGH)[place % 2] / ((LOW + HIGH) / 2)
        arrived.append(begin + length * np.sort(rng.random(rng.poisson(now * length))))
    return np.concatenate(arrived)


TRACES: dict[str, Callable[..., np.ndarray]] = {
    **ARRIVALS,
    "swinging": swinging_arrivals,
    "azure code": lambda rate, seconds, *, seed: azure_arrivals("code", rate, seconds, seed=seed),
    "azure conv": lambda rate, seconds, *, seed: azure_arrivals("conv", rate, seconds, seed=seed),
}
