"""The weights of an engine that sleeps at times: how they leave its devices, and how they come back."""

import logging
import pathlib

import jax

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.stores import DiskStore, Fetch, to_host
from jaxinfer.generation.execution.spares import STAGING
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.streaming.layer_folders import open_layer_files

log = logging.getLogger(__name__)


class WholeWeights:
    """All weights of a model, on its devices, in the host's memory, or on disk alone.

    They come back from one file in the user's cache, in the format of the devices, which is written when it is first
    needed. Reading the checkpoint again would take several times as long.

    Args:
      opened: the model.
      folder: the folder of that file; None: as `open_layer_files` chooses.
      leaves: the weights, if they are on the devices.
    """

    def __init__(self, opened: OpenedModel, folder: pathlib.Path | None = None, leaves: list[jax.Array] | None = None):
        self._opened, self._folder = opened, folder
        self._leaves, self._fetch = leaves, None
        self._store: DiskStore | None = None
        self._on_host: list[jax.Array] | None = None

    def load(self) -> list[jax.Array]:
        """Bring the weights to the devices, in the order in which programs take them. Raises CheckpointError."""
        if self._leaves is None:
            self._leaves = self._from_host() if self._on_host is not None else self._from_disk()
        return self._leaves

    def release(self, *, to_disk: bool) -> None:
        """Free the devices.

        Unless they go `to_disk`, a copy stays in the host's memory, where a CPU has them anyway.
        """
        leaves, fetch, self._leaves, self._fetch = self._leaves, self._fetch, None, None
        if leaves is not None and not to_disk:
            if self._opened.platform == "cpu":
                self._leaves, self._fetch = leaves, fetch
                return
            self._on_host = list(map(to_host, leaves))
        if to_disk:
            _delete(self._on_host)
            self._on_host = None
        if fetch is not None:
            fetch.release()
        else:
            _delete(leaves)

    def _from_host(self) -> list[jax.Array]:
        copies, self._on_host = self._on_host, None
        assert copies is not None
        leaves = jax.device_put(copies, [copy.sharding.with_memory_kind("device") for copy in copies])
        jax.block_until_ready(leaves)
        _delete(copies)
        return leaves

    def _from_disk(self) -> list[jax.Array]:
        if self._opened.stages is None:
            try:
                return self._fetched()
            except CheckpointError as error:
                self._store = None
                log.warning("weights are read from the checkpoint, which takes longer: %s", error)
        return list(self._opened.read(stays=True).values())

    def _fetched(self) -> list[jax.Array]:
        fetch: Fetch = self._open().start(0)
        try:
            fetch.place()
            leaves = fetch.settle()
        except BaseException:
            fetch.release()
            raise
        self._fetch = fetch
        return leaves

    def _open(self) -> DiskStore:
        if self._store is None:
            opened = self._opened
            files = open_layer_files(opened, self._folder, whole=True, cached=True)
            shardings = [opened.sharding(leaf) for leaf in opened.shapes.values()]
            self._store = DiskStore(files, {0: shardings}, aliases=opened.platform == "cpu", staging=STAGING)
        return self._store


def _delete(arrays: list[jax.Array] | None) -> None:
    for array in arrays or ():
        array.delete()
