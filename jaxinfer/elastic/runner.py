"""Runs batches of queries on a service's programs."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxinfer.elastic.latency import LatencyProfile
from jaxinfer.elastic.programs import Launched, LevelPrograms
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.generation.engine.buckets import round_up
from jaxinfer.serving.errors import FailedError


def best_labels(launched: Launched) -> list[tuple[str, np.ndarray] | FailedError]:
    """Of each image of a batch the label of the most probable class, and the probabilities of all.

    An image whose logits are not finite has an error in their place.
    """
    return [_best_label(row, labels) for row, labels in zip(launched.rows(), launched.labels, strict=True)]


def _best_label(logits: np.ndarray, labels: Sequence[str]) -> tuple[str, np.ndarray] | FailedError:
    own = logits[: len(labels)]
    if not np.isfinite(own).all():
        return FailedError(f"the logits of an image are not finite ({own}): the model's weights or format overflow.")
    exponentials = np.exp(own - own.max())
    probabilities = exponentials / exponentials.sum()
    return labels[int(probabilities.argmax())], probabilities


class Runner(Protocol):
    """The device side."""

    def launch(self, level: int, queries: Sequence[Query]) -> Any:
        """Send a batch to the device, without waiting for it."""
        ...

    def collect(self, launched: Any) -> list[tuple[str, np.ndarray] | FailedError]:
        """Wait for a batch; label and probabilities of each query, or why it has none."""
        ...

    def expected_seconds(self, level: int, count: int) -> float:
        """What a batch of so many queries usually takes."""
        ...

    def observe(self, level: int, count: int, seconds: float) -> None:
        """What one took."""
        ...


class LevelRunner:
    """Runs batches on the programs of levels.

    Args:
      programs: of all levels.
      latency: what batches take, which it adds to.
      on_drift: called when what batches take has changed.
    """

    def __init__(
        self,
        programs: LevelPrograms,
        latency: LatencyProfile,
        on_drift: Callable[[], None],
    ):
        self._programs, self._latency, self._on_drift = programs, latency, on_drift

    def launch(self, level: int, queries: Sequence[Query]) -> Launched:
        return self._programs.launch(level, [query.task for query in queries], np.stack([q.payload for q in queries]))

    def collect(self, launched: Launched) -> list[tuple[str, np.ndarray] | FailedError]:
        return best_labels(launched)

    def expected_seconds(self, level: int, count: int) -> float:
        return self._latency.of(level, round_up(count, self._programs.sizes)).p50

    def observe(self, level: int, count: int, seconds: float) -> None:
        if self._latency.observe(level, round_up(count, self._programs.sizes), seconds):
            self._on_drift()
