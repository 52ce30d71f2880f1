"""Moving experts' weights between disk, the host's memory and devices.

An expert on disk is one aligned file, written beside its Orbax checkpoint when it is first needed
(`checkpoints/layer_files.py`): loading it is one read and one `device_put`, and builds no module. Building modules is
most of the 0.4 to 1.1 s that the paper measured for 178 MB (decision 0015).
"""

import dataclasses
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.host_memory import aligned
from jaxinfer.checkpoints.stores import DiskStore, Fetch, Staging
from jaxinfer.compiled import cache_folder
from jaxinfer.execution.forward import is_out_of_memory
from jaxinfer.experts.errors import InsufficientMemoryError, LoadError
from jaxinfer.experts.execution.architectures import Architecture
from jaxinfer.experts.execution.kinds import ExpertKind
from jaxinfer.experts.execution.place import Place
from jaxinfer.experts.scheduling.request import Eviction, Load
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.streaming.layer_folders import layer_folder, open_layer_files, write_layer_files

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedExpert:
    """An expert whose checkpoint has been checked.

    Attributes:
      kind: how it takes and judges inputs.
    """

    name: str
    opened: OpenedModel
    kind: ExpertKind

    @property
    def architecture(self) -> Architecture:
        """The architecture that it shares with others."""
        return Architecture.from_kind(self.kind, self.opened.weights)


def write_expert(opened: OpenedModel) -> pathlib.Path:
    """Write the file of an expert, unless it exists; return its folder. Raises CheckpointError."""
    return write_layer_files(opened, _base(opened), parts=1)


def _base(opened: OpenedModel) -> pathlib.Path:
    """The folder of an expert's file: the checkpoint's, or the cache folder where that is read-only."""
    folder = layer_folder(opened, opened.folder, parts=1)
    if folder.exists() or os.access(folder.parent, os.W_OK):
        return folder.parent
    return cache_folder() / "experts"


def file_bytes(opened: OpenedModel) -> int:
    """The bytes of an expert's file and of its read buffer: each part of a leaf begins at a multiple of `ALIGNMENT`."""
    total = 0
    for leaf in opened.shapes.values():
        parts = math.prod(leaf.shape) // math.prod(opened.sharding(leaf).shard_shape(leaf.shape))
        total += parts * aligned(leaf.bytes // parts)
    return total


type _HostCopy = Future[list[jax.Array] | None]
"""An expert's copy in the host's memory, done or in the making; None if it failed."""
type OnCopied = Callable[[str, float], None]
"""Callback for an expert that was copied to the host's memory, and the seconds it took."""


class ExpertLoader:
    """Loader that carries out decisions about weights. Any thread may call; each call blocks until it is done.

    Args:
      find: returns the expert of a name; raises LoadError if it cannot be opened.
      places: each pool's devices, by its index.
      staging: the read buffers and the threads that read; closed by the loader.
      preadv: reads from files; benchmarks pass a slower one.
    """

    def __init__(
        self,
        find: Callable[[str], OpenedExpert],
        places: Sequence[Place],
        *,
        staging: Staging,
        preadv: Callable[[int, list[Any], int], int] = os.preadv,
    ):
        self._find, self._places, self._preadv = find, places, preadv
        self._staging = staging
        self._stores: dict[tuple[str, Place], DiskStore] = {}
        self._resident: dict[tuple[int, str], Fetch | _Copy] = {}
        self._host: dict[str, _HostCopy] = {}
        self._left: dict[int, Future[None]] = {}  # per pool: done when its latest evictions are
        self._lock = threading.Lock()

    def leaves(self, pool: int, name: str) -> list[jax.Array]:
        """The weights of an expert in a pool, in the order in which programs take them."""
        return self._resident[pool, name].settle()

    def disk(self, name: str) -> str:
        """A name for an expert's disk, by the system's number and the way of reading. Raises LoadError."""
        return f"{os.stat(_base(self._find(name).opened)).st_dev}, {self._preadv!r}"

    def prepare(
        self, load: Load, on_begin: Callable[[], None] = lambda: None, on_copied: OnCopied = lambda name, seconds: None
    ) -> Callable[[], None]:
        """Note a load's changes, in the order of the scheduler's decisions; return the function that makes them.

        From here on its copies on the host are known, so that a later load from there waits for the one that makes
        them.

        Args:
          on_begin: called when the experts that make room have left.
          on_copied: see `note`.
        """
        changes = self.begin_eviction(load.pool, load.evictions, load.dropped, on_copied)
        with self._lock:
            source = self._host.pop(load.expert, None) if load.tier == "host" and load.source is None else None

        def run() -> None:
            changes()
            on_begin()
            self._load(load, source)

        return run

    def begin_eviction(
        self,
        pool: int,
        evictions: Sequence[Eviction],
        dropped: Sequence[str],
        on_copied: OnCopied = lambda name, seconds: None,
    ) -> Callable[[], None]:
        """Note that experts leave a pool, or the host's memory; return the function that has them leave.

        Args:
          on_copied: called with each expert that was copied to the host's memory, and the seconds it took, including
            freeing the copies that it replaces.
        """
        with self._lock:
            copies = {x.expert: Future[list[jax.Array] | None]() if x.to_host else None for x in evictions}
            leaving = [(name, self._resident.pop((pool, name)), copy) for name, copy in copies.items()]
            self._host |= {name: copy for name, copy in copies.items() if copy is not None}
            gone = [copy for name in dropped if (copy := self._host.pop(name, None))]
            before, done = self._left.get(pool), Future[None]()
            self._left[pool] = done

        def run() -> None:
            if before is not None:
                before.result()  # executors may share a pool: free its memory in the order of the decisions
            begun, copied = time.perf_counter(), list[str]()
            try:
                for name, fetch, copy in leaving:
                    if copy is not None and (leaves := _to_host(fetch)) is not None:
                        copy.set_result(leaves)
                        copied.append(name)
                    fetch.release()
                for lost in gone:
                    _delete(lost.result())
                for name in copied:
                    on_copied(name, (time.perf_counter() - begun) / len(copied))
            finally:  # whatever happened, nobody may wait for ever
                for _, _, copy in leaving:
                    if copy is not None and not copy.done():
                        copy.set_result(None)
                done.set_result(None)

        return run

    def close(self) -> None:
        """Free all memory."""
        for fetch in self._resident.values():
            fetch.release()
        self._resident.clear()
        self._host.clear()
        self._staging.readers.close()

    def _load(self, load: Load, source: _HostCopy | None) -> None:
        try:
            self._resident[load.pool, load.expert] = self._fetch(load, source)
        except Exception as error:
            if is_out_of_memory(error):
                raise InsufficientMemoryError(f"there is no memory for expert {load.expert!r}: {error}") from error
            raise

    def _fetch(self, load: Load, source: _HostCopy | None) -> "Fetch | _Copy":
        place = self._places[load.pool]
        if load.source is not None:
            return _Copy(place.copy(self.leaves(load.source, load.expert)))
        if source is not None and (copies := source.result()) is not None:
            try:
                return _Copy(place.copy(copies))
            finally:
                _delete(copies)
        return self._read(load.expert, place)

    def _read(self, name: str, place: Place) -> Fetch:
        try:
            store = self._store(name, place)
            fetch = store.start(0)
            try:
                fetch.place()
                fetch.settle()
            except BaseException:
                fetch.release()
                raise
        except CheckpointError as error:
            self._stores.pop((name, place), None)  # open it again on the next attempt
            raise LoadError(str(error)) from error
        return fetch

    def _store(self, name: str, place: Place) -> DiskStore:
        if (store := self._stores.get((name, place))) is not None:
            return store
        opened = self._find(name).opened
        files = open_layer_files(opened, _base(opened), parts=1, preadv=self._preadv)
        shardings = [place.sharding(leaf) for leaf in opened.shapes.values()]
        store = DiskStore(files, {0: shardings}, aliases=place.platform == "cpu", staging=self._staging)
        self._stores[name, place] = store
        return store


class _Copy:
    """An expert copied from the host's memory or from another pool, even one on the same devices."""

    def __init__(self, leaves: list[jax.Array]):
        self._leaves = leaves

    def settle(self) -> list[jax.Array]:
        return self._leaves

    def release(self) -> None:
        for leaf in self._leaves:
            leaf.delete()


def _to_host(fetch: "Fetch | _Copy") -> list[jax.Array] | None:
    """Copy to the host's memory, pinned where the device is a GPU; return None if that fails."""
    try:
        leaves = fetch.settle()
        shardings = [leaf.sharding.with_memory_kind("pinned_host") for leaf in leaves]
        return jax.block_until_ready(jax.device_put(leaves, shardings, may_alias=False))
    except Exception as error:  # whatever the error, it is not the fault of the expert that is loaded in its place
        log.warning("an expert does not stay in the host's memory: %s; the next load is from disk.", error)
        return None


def _delete(arrays: list[jax.Array] | None) -> None:
    for array in arrays or ():
        array.delete()
