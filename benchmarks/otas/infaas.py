"""INFaaS: three sizes of a model in place of token levels, trained and measured here, or ViT-S/B/L simulated."""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxinfer.elastic.scheduling.policies import Elastic, ModelSwitching
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.evaluation.elastic.measurements import Measurements
from jaxinfer.evaluation.elastic.simulator import ServedTrace, simulate
from jaxinfer.evaluation.elastic.workloads import make_queries, table_ii, wandering_arrivals
from jaxinfer.models.files.loading import open_model

LOADS = 9
"""Number of timed loads per model."""

SIZES = (1, 2, 4, 8, 16, 32, 64)
PAPER_RATES = {-20: 1250, -15: 1000, -10: 850, -5: 700, 0: 580, 2: 550, 4: 500, 8: 430}
"""Images a second of ViT-B by level, read off OTAS's Fig. 4b."""
PAPER_LOSSES = {-20: 0.35, -15: 0.06, -10: 0.03, -5: 0.01, 0: 0.0, 2: -0.01, 4: -0.012, 8: -0.015}
"""Loss of accuracy relative to level 0, after the shape of Fig. 4a."""
PAPER_ACCURACY = {"cifar10": 0.97, "cifar100": 0.85, "eurosat": 0.96}
BATCH_SECONDS = 0.005
"""Constant seconds of a batch, on top of those that grow with it."""
VITS = {"S": (953, 0.8141, 22_050_664), "B": (309, 0.8457, 86_567_656), "L": (95, 0.8582, 304_326_632)}
"""Images a second (V100) and ImageNet accuracy of ViT-S/B/L at 224 pixels (ToMe's README, AugReg), and parameters."""
LINKS = {"PCIe 3.0 x16, 12 GB/s": 12e9, "NVMe, 2 GB/s": 2e9, "network, 1 Gbit/s": 0.125e9}


def as_levels(models: Sequence[Measurements]) -> Measurements:
    """Use models in place of levels: level n is the n-th model's level 0."""
    first = models[0]
    profile = ServingProfile(
        levels=tuple(range(len(models))),
        sizes=first.profile.sizes,
        seconds={
            (index, size): model.profile.seconds[0, size]
            for index, model in enumerate(models)
            for size in first.profile.sizes
        },
        accuracy={
            (task, index): model.profile.accuracy_at(task, 0)
            for index, model in enumerate(models)
            for task in first.profile.tasks
        },
    )
    return dataclasses.replace(
        first,
        profile=profile,
        samples={(index, size): model.samples[0, size] for index, model in enumerate(models) for size in profile.sizes},
        right={(task, index): model.right[task, 0] for index, model in enumerate(models) for task in profile.tasks},
    )


def seconds_to_load(folder: Path) -> float:
    """Time loading a model's weights from the page cache to the device."""
    times = []
    for _ in range(LOADS):
        opened = open_model(folder)
        begun = time.perf_counter()
        opened.load()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def paper_profile() -> ServingProfile:
    """Make the profile of ViT-B's levels after OTAS."""
    return _profile(PAPER_RATES, PAPER_LOSSES)


def vits_profile() -> ServingProfile:
    """Make the profile of ViT-S/B/L as levels 0 to 2, relative to ViT-B at level 0."""
    base_rate, base_accuracy, _ = VITS["B"]
    rates = [PAPER_RATES[0] * rate / base_rate for rate, _, _ in VITS.values()]
    losses = [base_accuracy - accuracy for _, accuracy, _ in VITS.values()]
    return _profile(dict(enumerate(rates)), dict(enumerate(losses)))


def _profile(rates: Mapping[int, float], losses: Mapping[int, float]) -> ServingProfile:
    largest = SIZES[-1]
    return ServingProfile(
        levels=tuple(rates),
        sizes=SIZES,
        seconds={
            (level, size): BATCH_SECONDS + size * (largest / rate - BATCH_SECONDS) / largest
            for level, rate in rates.items()
            for size in SIZES
        },
        accuracy={
            (task, level): PAPER_ACCURACY[task] - loss for task in PAPER_ACCURACY for level, loss in losses.items()
        },
    )


def simulated_gain(load: float, link: float, *, seed: int, count: int, by_worth: bool = False) -> float:
    """Simulate the utility of elastic tokens relative to INFaaS with ViT-S/B/L, in float32 over a link.

    The link has `link` bytes/s. INFaaS batches as the paper does, or as elastic tokens do if `by_worth`.
    """
    levels, models, rate = paper_profile(), vits_profile(), load * PAPER_RATES[0]
    queries = make_queries(wandering_arrivals(rate, count / rate, seed=seed), table_ii(list(PAPER_ACCURACY)), seed=seed)
    loads = {index: 4 * parameters / link for index, (_, _, parameters) in enumerate(VITS.values())}
    elastic = Elastic(levels)
    switching = ModelSwitching(models, loads, elastic.batching if by_worth else None)
    ours: ServedTrace = simulate(queries, elastic, levels, seed=seed)
    theirs: ServedTrace = simulate(queries, switching, models, seed=seed)
    return ours.utility / theirs.utility
