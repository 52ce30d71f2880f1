"""What is served: the committed tasks, how long their batches take here, and which images each level gets right."""

import dataclasses
import functools
import gzip
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.report import ROOT
from examples.train_elastic_vit import TEST, TEST_SEED
from jaxinfer.elastic import Dataset, Service, load_dataset
from jaxinfer.elastic.scheduling.batching import BatchingConfig
from jaxinfer.elastic.scheduling.policies import (
    Elastic,
    FixedLevel,
    LargestThatFits,
    Paper,
    PaperConfig,
    Policy,
    SlackFit,
)
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.elastic.scheduling.workloads import (
    bursty_arrivals,
    make_queries,
    poisson_arrivals,
    table_ii,
    wandering_arrivals,
)

BACKBONE, DATA = ROOT / "examples" / "elastic_vit", ROOT / "benchmarks" / "data"
TASKS = ("mnist", "digits", "textures")
"""In place of CIFAR-10, CIFAR-100 and EuroSAT."""
SAMPLES = 40
"""Batches of each level and size that are timed, for latencies to be replayed."""
PAPER_BATCH_SECONDS = 64 / 580
"""Of the paper's largest batch at level 0: deadlines are scaled by how much faster ours is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a simulation needs.

    Attributes:
      profile: what controllers know.
      samples: seconds of batches by level and size, to draw from.
      right: by task and level, which test images are classified rightly, bool [images].
      scale: of the paper's latencies.
    """

    profile: ServingProfile
    samples: Mapping[tuple[int, int], np.ndarray]
    right: Mapping[tuple[str, int], np.ndarray]
    scale: float

    @property
    def capacity(self) -> float:
        """Queries a second at level 0, in full batches that take as long as they usually do."""
        largest = self.profile.sizes[-1]
        return largest / float(np.median(self.samples[0, largest]))

    def queries(self, arrivals: np.ndarray, seed: int) -> list[Query]:
        """The paper's mix; each query has an image of its task, by index."""
        rng, made = (
            np.random.default_rng((seed, 3)),
            make_queries(arrivals, table_ii(TASKS), seed=seed, scale=self.scale),
        )
        count = {task: len(self.right[task, 0]) for task in TASKS}
        return [dataclasses.replace(query, payload=int(rng.integers(count[query.task]))) for query in made]

    def is_right(self, query: Query, level: int) -> bool:
        return bool(self.right[query.task, level][query.payload])

    def sampler(self, seed: int) -> Callable[[int, int], float]:
        """Draws what a batch takes."""
        rng, profile = np.random.default_rng((seed, 4)), self.profile

        def seconds(level: int, count: int) -> float:
            size = next(size for size in profile.sizes if size >= count)
            return float(rng.choice(self.samples[level, size]))

        return seconds

    def best(self, queries: Sequence[Query]) -> float:
        """What all queries earn at the level that is best for their task, in time: a bound for everybody."""
        best = {task: max(self.right[task, level].mean() for level in self.profile.levels) for task in TASKS}
        return sum(query.utility * best[query.task] for query in queries)


def open_service(**options) -> Service:
    """The committed tasks, with what batches take here."""
    service = Service.from_checkpoint(BACKBONE, **options)
    service.measure_latency()
    return service


def test_images(service: Service) -> dict[str, Dataset]:
    """The images of each task that nothing was trained on."""
    size = service.config.image_size
    return {name: load_dataset(name, size).split(TEST, seed=TEST_SEED)[1] for name in TASKS}


def _right(service: Service, task: str, level: int, test: Dataset) -> np.ndarray:
    answers = service.classify(test.images, task, level)
    return np.array([answer.label == test.names[label] for answer, label in zip(answers, test.labels, strict=True)])


def measure(service: Service) -> Setting:
    """Time batches, and classify all test images at all levels."""
    tests, profile = test_images(service), service.serving_profile()
    samples = {}
    for level in profile.levels:
        for size in profile.sizes:
            images = np.resize(tests[TASKS[0]].images, (size, *tests[TASKS[0]].images.shape[1:]))
            found = []
            for _ in range(SAMPLES):
                begun = time.perf_counter()
                service.classify(images, TASKS[0], level)
                found.append(time.perf_counter() - begun)
            samples[level, size] = np.array(found[1:])
    seconds = {key: float(np.percentile(found, 95)) for key, found in samples.items()}
    accuracy = {(task, level): profile.right(task, level) for task in TASKS for level in profile.levels}
    right = {
        (task, level): _right(service, task, level, test) for task, test in tests.items() for level in profile.levels
    }
    known = dataclasses.replace(profile, seconds=seconds, accuracy=accuracy)
    scale = float(np.median(samples[0, profile.sizes[-1]])) / PAPER_BATCH_SECONDS
    return Setting(profile=known, samples=samples, right=right, scale=scale)


def policies(setting: Setting) -> dict[str, Callable[[], Policy]]:
    """Those that adapt, PetS, and the other fixed levels, all with the paper's batching at this device's pace."""
    profile, batching = setting.profile, BatchingConfig(max_batch=setting.profile.sizes[-1]).scaled(setting.scale)
    printed = dataclasses.replace(batching, paper=True)
    initial = PaperConfig(initial=setting.scale * PaperConfig().initial)
    levels = {f"level {level:+d}": functools.partial(FixedLevel, profile, level, batching) for level in profile.levels}
    del levels["level +0"]
    return {
        "elastic": lambda: Elastic(profile, batching),
        "paper": lambda: Paper(profile, printed, initial),
        "pets": lambda: FixedLevel(profile, 0, batching),
        "slack": lambda: LargestThatFits(profile, batching),
        "slackfit": lambda: SlackFit(profile, batching),
        **levels,
    }


def azure_arrivals(name: str, rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Arrivals of the Azure LLM inference trace 2023 ("code" or "conv"), from a place that the seed draws, sped up."""
    with gzip.open(DATA / f"azure_llm_2023_{name}.txt.gz", "rt") as file:
        times = np.cumsum([int(line) for line in file if not line.startswith("#")]) / 1000
    count = round(rate * seconds)
    repeats = -(-2 * count // len(times))
    times = np.concatenate([times + k * (times[-1] + 1.0) for k in range(repeats)])
    first = int(np.random.default_rng((seed, 5)).integers(len(times) - count))
    part = times[first : first + count]
    return (part - part[0]) * (seconds / (part[-1] - part[0]))


TRACES: dict[str, Callable[..., np.ndarray]] = {
    "wandering": wandering_arrivals,
    "bursty": bursty_arrivals,
    "poisson": poisson_arrivals,
    "azure code": lambda rate, seconds, *, seed: azure_arrivals("code", rate, seconds, seed=seed),
    "azure conv": lambda rate, seconds, *, seed: azure_arrivals("conv", rate, seconds, seed=seed),
}
