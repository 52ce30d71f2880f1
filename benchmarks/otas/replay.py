"""The setting of an earlier result: nothing is compiled or measured, so that all can rerun what is simulated of it.

A result has the 95th percentile of each level's and size's batches, the median of one, and accuracies. So batches take
log-normal times with the 95th percentile as recorded, and that one's ratio to the median. Answers are right as often as
recorded. A model's batches take the times of level 0, scaled by the capacities.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

from benchmarks.otas.setting import Setting
from benchmarks.report import ROOT
from jaxinfer.elastic.latency import LevelAndSize
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.evaluation.elastic.measurements import SAMPLES, Measurements

RECORDED = ROOT / "benchmarks/results/amd-avx512/otas.json"
"""The result that quick runs replay."""
IMAGES = 1000
"""Number of a task's test images."""


def replayed(result: Mapping[str, Any]) -> Setting:
    """Make the setting of a result of the part `virtual`."""
    row = next(row for row in result["rows"] if row["figure"] == "setting")
    seconds = {(int(level), int(size)): value for (level, size), value in _by_pair(row["seconds"])}
    largest = max(size for _, size in seconds)
    usual = largest / seconds[0, largest]
    models = {
        (model, size): seconds[0, size] * usual / capacity
        for model, capacity in enumerate(row["model_capacity"])
        for level, size in seconds
        if level == 0
    }
    spread = np.log(row["capacity"] / usual) / ndtri(0.95)
    return Setting(
        _measurements(row, seconds, row["accuracy"], spread),
        _measurements(row, models, row["model_accuracy"], spread),
        dict(enumerate(row["load_seconds"])),
        tests={},
    )


def read(path: Path) -> dict[str, Any]:
    """Read a result."""
    return json.loads(path.read_text())


def _by_pair(values: Mapping[str, float]) -> list[tuple[list[str], float]]:
    return [(key.split(), value) for key, value in values.items()]


def _measurements(
    row: Mapping[str, Any], seconds: Mapping[LevelAndSize, float], recorded: Mapping[str, float], spread: float
) -> Measurements:
    """Make measurements.

    Args:
      row: the setting's row.
      seconds: the 95th percentiles.
      recorded: accuracies by "TASK LEVEL".
      spread: standard deviation of the logarithm of a batch's seconds.
    """
    accuracy = {(task, int(level)): value for (task, level), value in _by_pair(recorded)}
    quantiles = (np.arange(SAMPLES) + 0.5) / SAMPLES
    relative = np.exp(spread * (ndtri(quantiles) - ndtri(0.95)))
    return Measurements(
        profile=ServingProfile(
            levels=tuple(dict.fromkeys(level for level, _ in seconds)),
            sizes=tuple(dict.fromkeys(size for _, size in seconds)),
            seconds=dict(seconds),
            accuracy=accuracy,
        ),
        samples={key: value * relative for key, value in seconds.items()},
        right={key: np.arange(IMAGES) < round(IMAGES * value) for key, value in accuracy.items()},
        capacity=row["capacity"],
        scale=row["latency_scale"],
    )
