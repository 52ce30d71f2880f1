"""Vectors of images, batch by batch."""

import threading
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxinfer.compiled import Costs, Origin, executable_store
from jaxinfer.compiled.costs import SAVE_SECONDS
from jaxinfer.execution.forward import Forward, LaunchedBatch
from jaxinfer.generation.execution.programs import embed_images
from jaxinfer.generation.execution.programs.embed_images import EmbedImages
from jaxinfer.models import ViTConfig
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.models.vision.image_files import AnyImage, fitted, pixels_of
from jaxinfer.serving.errors import closed_error


class ImageEngine:
    """A vision transformer on its device, which runs one call at a time.

    Args:
      model: the model.
      max_batch: images of the largest batch in each lane; smaller ones have powers of two as sizes.
      level: -r: each layer merges r tokens; 0: none.
      kernels: whether operations may run as kernels.
      costs: the record to which the time of each batch is added.
    """

    def __init__(self, model: LoadedModel, *, max_batch: int, level: int, kernels: bool, costs: Costs):
        assert isinstance(model.config, ViTConfig)
        self._config: ViTConfig = model.config
        self._costs = costs
        self._forward: Forward[EmbedImages] | None = Forward(
            embed_images.spec(model, level),
            max_batch=max_batch,
            mesh=model.mesh,
            lanes=model.lanes,
            kernels=kernels,
            store=executable_store(),
            costs=costs,
        )
        self._max_batch = self._forward.sizes[-1]
        self._leaves: list[jax.Array] | None = list(model.leaves.values())
        self._lock = threading.RLock()  # held by batches and by `close`
        self._origin = Origin("This model")

    def embed(self, images: Sequence[AnyImage]) -> np.ndarray:
        """Compute the vectors of images, of length 1: float32 [images, feature_width].

        The next batch is read and resized while one runs. Raises ValueError for an invalid image, naming it.
        """
        self._origin.check()
        vectors, running = [], None
        for batch in self._batches(images):
            if running is not None:
                vectors.append(running.result())
            running = self._launch(batch)
        if running is not None:
            vectors.append(running.result())
        self._costs.save(every=SAVE_SECONDS)
        return np.concatenate(vectors or [np.zeros((0, self._config.feature_width), np.float32)])

    def _batches(self, images: Sequence[AnyImage]) -> Iterator[np.ndarray]:
        config, largest = self._config, self._max_batch
        for first in range(0, len(images), largest):
            batch = []
            for index in range(first, min(first + largest, len(images))):
                try:
                    batch.append(fitted(pixels_of(images[index]), config.image_size, config.preprocessing))
                except ValueError as error:
                    raise ValueError(f"Image {index}: {error}") from error
            yield np.stack(batch)

    def _launch(self, batch: np.ndarray) -> LaunchedBatch:
        with self._lock:
            if self._forward is None:
                raise closed_error("This model")
            return self._forward.launch((self._leaves,), batch)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the engine's."""
        return self._origin.forked

    def close(self, *, timeout: float | None = None) -> None:
        """Release the weights, when no batch is being sent; from any thread, also repeatedly."""
        if self._origin.forked:
            return
        if self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            try:
                self._leaves = self._forward = None
            finally:
                self._lock.release()
