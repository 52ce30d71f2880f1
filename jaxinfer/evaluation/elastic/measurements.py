"""Measurements for simulations: the seconds of a service's batches, and each level's right answers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxinfer.elastic.latency import LevelAndSize
from jaxinfer.elastic.scheduling.policies import Policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.elastic.service import Service
from jaxinfer.elastic.tasks.datasets import Dataset
from jaxinfer.evaluation.elastic.simulator import ServedTrace, simulate
from jaxinfer.evaluation.elastic.workloads import QueryKind, make_queries, table_ii
from jaxinfer.progress import ProgressOption, long_work, showing
from jaxinfer.sizes import round_up

SAMPLES = 40
"""Number of batches timed at each level and size."""
PAPER_BATCH_SECONDS = 64 / 580
"""Seconds of OTAS's largest batch at level 0 (Fig. 4b): deadlines are scaled by how much faster a batch is here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything that a simulation needs.

    Attributes:
      profile: the profile for controllers.
      samples: measured seconds of batches by level and size, to draw from.
      right: whether each image is classified rightly, bool [images], by task and level.
      capacity: queries a second at level 0, in full batches of the median duration.
      scale: factor on the paper's latencies: a batch's seconds here, relative to the paper's.
    """

    profile: ServingProfile
    samples: Mapping[LevelAndSize, np.ndarray]
    right: Mapping[tuple[str, int], np.ndarray]
    capacity: float
    scale: float

    def queries(self, arrivals: np.ndarray, *, seed: int, kinds: Sequence[QueryKind] | None = None) -> list[Query]:
        """Make a query for each arrival; its payload is the index of an image of its task.

        Args:
          arrivals: seconds, ascending.
          seed: seed of all that is drawn.
          kinds: the kinds to draw from, latencies in the paper's seconds; None: `table_ii` of all tasks.
        """
        kinds = table_ii(self.profile.tasks) if kinds is None else kinds
        made = make_queries(arrivals, kinds, seed=seed, scale=self.scale)
        return self.with_images(made, seed=seed)

    def with_images(self, queries: Sequence[Query], *, seed: int) -> list[Query]:
        """Give queries images drawn at random, as indices."""
        rng, level = np.random.default_rng((seed, 3)), self.profile.levels[0]
        count = {task: len(self.right[task, level]) for task in self.profile.tasks}
        return [dataclasses.replace(query, payload=int(rng.integers(count[query.task]))) for query in queries]

    def is_right(self, query: Query, level: int) -> bool:
        """Check whether the query's image is classified rightly."""
        return bool(self.right[query.task, level][query.payload])

    def sampler(self, seed: int) -> Callable[[int, int], float]:
        """A function that draws a batch's seconds, by level and number of queries."""
        rng, profile = np.random.default_rng((seed, 4)), self.profile

        def seconds(level: int, count: int) -> float:
            return float(rng.choice(self.samples[level, round_up(count, profile.sizes)]))

        return seconds

    def best(self, queries: Sequence[Query]) -> float:
        """Compute an upper bound of utility: each query answered in time at its task's best level."""
        tasks, levels = self.profile.tasks, self.profile.levels
        best = {task: max(self.right[task, level].mean() for level in levels) for task in tasks}
        return float(sum(query.utility * best[query.task] for query in queries))

    def simulate(self, queries: Sequence[Query], policy: Policy, *, seed: int) -> ServedTrace:
        """Serve queries with images on a simulated clock; the seed draws the seconds of batches."""
        served = simulate(queries, policy, self.profile, seconds=self.sampler(seed), right=self.is_right)
        return dataclasses.replace(served, best=self.best(queries))


def measure(
    service: Service,
    tests: Mapping[str, Dataset],
    *,
    levels: Sequence[int] | None = None,
    samples: int = SAMPLES,
    progress: ProgressOption = None,
) -> Measurements:
    """Time batches and classify all images at all levels.

    Args:
      service: the service to measure.
      tests: images of its tasks, or of some of them.
      levels: the levels to measure, ascending, 0 among them; None: all that all tasks have.
      samples: number of batches timed at each level and size; they replace the service's record.
      progress: who is told how far it is, as in `Service`.
    """
    with showing(progress):
        times = service.measure_latency(levels, remeasure=True, repeats=samples)
        profile = service.serving_profile(levels)
        judged = [(task, level) for task in tests for level in profile.levels]
        right = {}
        with long_work("classifying test images", total=len(judged)) as work:
            for task, level in judged:
                right[task, level] = which_are_right(service, task, level, tests[task])
                work.advance()
    accuracy = {key: value for key, value in profile.accuracy.items() if key[0] in tests}
    largest = profile.sizes[-1]
    usual = float(np.median(times[0, largest]))
    return Measurements(
        profile=dataclasses.replace(profile, accuracy=accuracy),
        samples=times,
        right=right,
        capacity=largest / usual,
        scale=usual / PAPER_BATCH_SECONDS,
    )


def which_are_right(service: Service, task: str, level: int, test: Dataset) -> np.ndarray:
    """Classify a task's images and return which ones rightly, bool [images]."""
    answers = service.classify(test.images, task, level)
    return np.array([answer.label == test.names[label] for answer, label in zip(answers, test.labels, strict=True)])
