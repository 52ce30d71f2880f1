"""The weights of an engine that sleeps at times: how they leave its devices, and how they come back."""

import dataclasses
import itertools
import logging
import pathlib
import time

import jax

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.stores import DiskStore, Fetch, to_host
from jaxinfer.generation.execution.spares import STAGING
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.streaming.layer_folders import divide_leaves, open_layer_files

log = logging.getLogger(__name__)

BYTES_PER_SECOND = 1e9
"""The speed at which weights are assumed to be read until some were."""
PARTS = 16
"""Parts that the weights of a model are divided into; each is given back and read by itself."""


@dataclasses.dataclass
class _Part:
    """Leaves that follow each other.

    Attributes:
      names: their names.
      bytes: bytes of each device.
      leaves: the leaves, while they are on the devices.
      fetch: what has brought them, and has their memory; None: they were read from the checkpoint.
      on_host: their copies in the host's memory.
    """

    names: list[str]
    bytes: int
    leaves: list[jax.Array] | None = None
    fetch: Fetch | None = None
    on_host: list[jax.Array] | None = None

    def free(self) -> None:
        """Give the memory of the devices back."""
        if self.fetch is not None:
            self.fetch.release()
        else:
            _delete(self.leaves)
        self.leaves = self.fetch = None

    def free_host(self) -> None:
        """Give the host's memory back."""
        _delete(self.on_host)
        self.on_host = None


class WholeWeights:
    """All weights of a model, each part of them on its devices, in the host's memory, or on disk alone.

    They come back from files in the user's cache, in the format of the devices, which are written when they are first
    needed. Reading the checkpoint again would take several times as long.

    Args:
      opened: the model.
      folder: the folder of these files; None: as `open_layer_files` chooses.
      leaves: the weights, if they are on the devices.

    Attributes:
      bytes_per_second: the speed at which parts were read last.
    """

    def __init__(self, opened: OpenedModel, folder: pathlib.Path | None = None, leaves: list[jax.Array] | None = None):
        self._opened, self._folder = opened, folder
        self.bytes_per_second = BYTES_PER_SECOND
        self._stores: list[DiskStore] = []
        self._parts = self._divided() if leaves is None else [self._undivided(leaves)]

    def _divided(self) -> list[_Part]:
        """The parts, without their leaves. A pipeline's weights come back from the checkpoint, all at once."""
        opened = self._opened
        groups = [list(opened.stage_leaves)] if opened.stages is not None else divide_leaves(opened, PARTS)
        return [_Part(names, opened.bytes_per_device(set(names).__contains__)) for names in groups]

    def _undivided(self, leaves: list[jax.Array]) -> _Part:
        """The leaves as they come from a checkpoint: on a CPU they have one memory."""
        return _Part(list(self._opened.stage_leaves), self._opened.bytes_per_device(), leaves)

    @property
    def device_bytes(self) -> int:
        """The bytes of each device."""
        return sum(part.bytes for part in self._parts if part.leaves is not None)

    @property
    def host_bytes(self) -> int:
        """The bytes of the host's memory for each device; 0 for a CPU, whose devices have them."""
        return sum(part.bytes for part in self._parts if part.on_host is not None)

    def load(self) -> list[jax.Array]:
        """Bring what is missing to the devices; return all leaves, in the order in which programs take them.

        Raises CheckpointError.
        """
        for part in self._parts:
            if part.on_host is not None:
                self._from_host(part)
        if any(part.leaves is None for part in self._parts):
            self._from_disk()
        return list(itertools.chain.from_iterable(part.leaves or [] for part in self._parts))

    def release(self, size: int | None = None, *, to_disk: bool) -> None:
        """Free this many bytes of each device, or a few more; None: all.

        Unless they go `to_disk`, copies stay in the host's memory, where a CPU has them anyway.
        """
        left = self._opened.bytes_per_device() if size is None else size
        for part in reversed(self._parts if to_disk or self._opened.platform != "cpu" else []):
            if part.leaves is None or left <= 0:
                continue
            if to_disk:
                part.free()
            else:
                part.on_host, part.leaves, part.fetch = list(map(to_host, part.leaves)), None, None
            left -= part.bytes
        if to_disk and size is None:
            self.release_host()
        self._divide()

    def release_host(self) -> None:
        """Free the copies in the host's memory."""
        for part in self._parts:
            part.free_host()
        self._divide()

    def _divide(self) -> None:
        """Have all parts come back from their files, once nothing is left of what came from the checkpoint."""
        if not (self.device_bytes or self.host_bytes):
            self._parts = self._divided()

    def _from_host(self, part: _Part) -> None:
        assert part.on_host is not None
        leaves = jax.device_put(part.on_host, [copy.sharding.with_memory_kind("device") for copy in part.on_host])
        part.leaves = jax.block_until_ready(leaves)
        part.free_host()

    def _from_disk(self) -> None:
        if self._opened.stages is None:
            try:
                self._fetch()
                return
            except CheckpointError as error:
                self._stores.clear()
                log.warning("weights are read from the checkpoint, which takes longer: %s", error)
                self.release(to_disk=True)
        self._parts = [self._undivided(list(self._opened.read(stays=True).values()))]

    def _fetch(self) -> None:
        """Read the parts that are missing, all at a time."""
        stores, begun, start = self._open(), list[tuple[_Part, Fetch]](), time.perf_counter()
        try:
            begun += [
                (part, stores[index].start(index)) for index, part in enumerate(self._parts) if part.leaves is None
            ]
            for _, fetch in begun:
                fetch.place()
            for part, fetch in begun:
                part.leaves = fetch.settle()
        except BaseException:
            for part, fetch in begun:
                part.leaves = None
                fetch.release()
            raise
        for part, fetch in begun:
            part.fetch = fetch
        self.bytes_per_second = sum(part.bytes for part, _ in begun) / (time.perf_counter() - start)

    def _open(self) -> list[DiskStore]:
        """The files of all parts: a store for each, whose buffers are as large as the part."""
        if not self._stores:
            opened = self._opened
            files = open_layer_files(opened, self._folder, parts=PARTS, cached=True)
            for index, part in enumerate(self._parts):
                shardings = [opened.sharding(opened.shapes[name]) for name in part.names]
                aliases = opened.platform == "cpu"
                self._stores.append(DiskStore(files, {index: shardings}, aliases=aliases, staging=STAGING))
        return self._stores


def _delete(arrays: list[jax.Array] | None) -> None:
    for array in arrays or ():
        array.delete()
