"""Running batches of queries on a service's programs."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxinfer.elastic.latency import LatencyProfile
from jaxinfer.elastic.programs import Launched, LevelPrograms
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.serving.errors import FailedError


def best_labels(launched: Launched) -> list[tuple[str, np.ndarray] | FailedError]:
    """The most probable class's label and all probabilities, for each image of a batch.

    An image whose logits are not finite has an error in their place.
    """
    return [_best_label(row, labels) for row, labels in zip(launched.rows(), launched.labels, strict=True)]


def _best_label(logits: np.ndarray, labels: Sequence[str]) -> tuple[str, np.ndarray] | FailedError:
    class_logits = logits[: len(labels)]
    if not np.isfinite(class_logits).all():
        return FailedError(
            f"the logits of an image are not finite ({class_logits}): the model's weights or format overflow."
        )
    exponentials = np.exp(class_logits - class_logits.max())
    probabilities = exponentials / exponentials.sum()
    return labels[int(probabilities.argmax())], probabilities


class Runner(Protocol):
    """The device side of serving."""

    def launch(self, level: int, queries: Sequence[Query]) -> Any:
        """Send a batch to the device, without waiting for it."""
        ...

    def collect(self, launched: Any) -> list[tuple[str, np.ndarray] | FailedError]:
        """Wait for a batch; return each query's label and probabilities, or its error."""
        ...

    def expected_seconds(self, level: int, count: int) -> float:
        """Compute the usual seconds of a batch of `count` queries."""
        ...

    def observe(self, level: int, count: int, seconds: float) -> None:
        """Record the seconds of a batch."""
        ...


class LevelRunner:
    """Runner of batches on the programs of levels.

    Args:
      programs: the programs of all levels.
      latency: the latency of batches, to which it adds.
      on_drift: called when the latency has changed.
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
        return self._latency.seconds(level, self._programs.padded(level, count)).p50

    def observe(self, level: int, count: int, seconds: float) -> None:
        if self._latency.observe(level, self._programs.padded(level, count), seconds):
            self._on_drift()
