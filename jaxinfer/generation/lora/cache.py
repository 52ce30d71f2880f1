"""The places of LoRA adapters: which are on the device, and where, and which in host memory; holds no device array."""

import functools
import os
from collections.abc import Callable

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.fields import check
from jaxinfer.futures import DaemonThreads, InterruptibleFuture
from jaxinfer.generation.lora.adapter_info import AdapterInfo
from jaxinfer.generation.lora.peft import Adapter, read_adapter
from jaxinfer.models.config import DecoderConfig
from jaxinfer.streaming.residents import Residents


class AdapterCache:
    """Brings adapters to the device as requests need them, through host memory, and evicts the least recently used.

    Files are read in a thread, from when a request is queued (`prefetch`), so that other requests' steps go on. They
    may be read again after an eviction. A name always stands for the same adapter, since cached prefixes are known by
    it: an adapter that has changed since it was first read is refused.

    Args:
      size: how many adapters the device has at once, at indices from 1; 0 stands for no adapter.
      max_rank: the rank that is reserved for each.
      host_bytes: host memory for adapters that have been read; the last one read stays in any case.
      family: the model's family, as for `read_adapter`.
      config: the model's config.
    """

    def __init__(self, size: int, max_rank: int, host_bytes: int, family: str, config: DecoderConfig):
        for name, value in (("size", size), ("max_rank", max_rank)):
            if value < 1:
                raise ValueError(f"{name}={value}: adapters need at least 1.")
        self.size, self.max_rank, self.host_bytes = size, max_rank, host_bytes
        self._family, self._config = family, config
        self._infos: dict[str, AdapterInfo] = {}
        self._names: list[str] = []
        self._empty = list(range(size, 0, -1))
        self._device: Residents[str, int] = Residents(size)  # adapters' indices
        self._uploads: list[tuple[int, Adapter]] = []
        self._host: Residents[str, Adapter] = Residents(host_bytes, keeps_last=True)
        self._reader = DaemonThreads(1, "jaxinfer-adapters")
        self._reading: dict[str, InterruptibleFuture[Adapter]] = {}
        self._digests: dict[str, bytes] = {}  # of adapters that have been read

    def register(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Register an adapter. Only its config is read; ValueError if that alone rules the adapter out."""
        name = check("An adapter's name", name, str)
        if name in self._infos:
            raise ValueError(f"adapter {name!r} is {self._infos[name].folder} already; choose another name.")
        info = AdapterInfo.read(folder)
        info.require_rank(self.max_rank)
        self._infos[name] = info
        self._names.append(name)

    def register_checked(self, name: str, folder: str | os.PathLike[str]) -> str:
        """Read an adapter, and register it under a name that stands for its content, NAME@DIGEST; return that name.

        A client's name can so mean another adapter later, while requests still use this one. It may be called from
        any thread, and again for the same adapter, whose new folder counts. A record of about 1 KB stays of each.

        Raises CheckpointError for an adapter that is damaged or does not fit the model.
        """
        adapter = read_adapter(folder, self._family, self._config, max_rank=self.max_rank)
        name = f"{name}@{adapter.digest.hex()}"
        self._digests[name] = adapter.digest
        self._infos[name] = adapter.info
        return name

    @property
    def names(self) -> list[str]:
        """The names of the adapters that were given to `register`."""
        return list(self._names)

    def digest(self, name: str) -> bytes:
        """A digest of an adapter's content, which has been read; equal in every process."""
        return self._digests[name]

    def check(self, name: str) -> None:
        """Raise ValueError if no adapter has this name."""
        if name not in self._infos:
            known = ", ".join(sorted(self._names)) or "none"
            raise ValueError(f"unknown adapter {name!r}; known: {known}.")

    def __contains__(self, name: str) -> bool:
        """Check whether an adapter is on the devices."""
        return name in self._device

    def prefetch(self, name: str) -> None:
        """Begin to read a known adapter that is needed soon; at most as many are read ahead as fit the device.

        An adapter that cannot be read is an error of the `pin` that needs it.
        """
        for other in [other for other, read in self._reading.items() if read.done() and read.error is None]:
            self._keep(other)
        known = name in self._infos and name not in self._device and name not in self._host
        if known and len(self._reading) < self.size:
            self._begin(name)

    def _begin(self, name: str) -> None:
        if name not in self._reading:
            read = functools.partial(
                read_adapter, self._infos[name].folder, self._family, self._config, max_rank=self.max_rank
            )
            self._reading[name] = self._reader.submit(_read_unchanged, read, name, self._digests)

    def _keep(self, name: str) -> Adapter:
        """Put the adapter being read into host memory; the least recently used make room."""
        adapter = self._reading.pop(name).result()
        self._host.add(name, adapter, adapter.nbytes)
        return adapter

    def pin(self, name: str, *, wait: bool = True) -> int | None:
        """Pin an adapter and return its index, valid until `unpin`; None while all are pinned by other adapters.

        wait: whether to wait for its files, rather than return None until they are read.
        Raises ValueError if the adapter is unknown or cannot be read; then nothing has changed.
        """
        self.check(name)
        if name not in self._device:
            adapter = self._read(name, wait=wait) if self._device.has_room(1) else None
            if adapter is None:
                return None
            self._place(name, adapter)
        return self._device.pin(name)

    def _place(self, name: str, adapter: Adapter) -> None:
        """Upload an adapter, in place of the least recently used one if there is no empty place."""
        if not self._empty:
            self._empty += self._device.evict(1).values()
        index = self._empty.pop()
        self._device.add(name, index)
        self._uploads.append((index, adapter))

    def take_uploads(self) -> tuple[tuple[int, Adapter], ...]:
        """Return the (index, adapter) pairs that the caller must place on the device, in order, before a batch runs.

        Linears that an adapter does not name must become zero.
        """
        uploads, self._uploads = tuple(self._uploads), []
        return uploads

    def reset(self) -> None:
        """Start over, whatever state the records are in: no adapter is used; each is read and placed when needed."""
        self._device.clear()
        self._host.clear()
        self._reading.clear()
        self._empty = list(range(self.size, 0, -1))
        self._uploads.clear()

    def unpin(self, name: str) -> None:
        """Undo one `pin`. The adapter stays until another one needs its place."""
        try:
            self._device.unpin(name)
        except ValueError as error:
            raise ValueError(f"adapter {error}") from None

    def _read(self, name: str, *, wait: bool) -> Adapter | None:
        """Read from host memory or else from disk; None if that has not ended and `wait` is false."""
        if (adapter := self._host.get(name)) is not None:
            return adapter
        self._begin(name)
        return self._keep(name) if wait or self._reading[name].done() else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless every place is empty or has one adapter, and host memory is within its bound."""
        places = [*self._empty, *self._device.values()]
        assert sorted(places) == list(range(1, self.size + 1)), f"places lost or doubled: {sorted(places)}"
        assert {*self._device, *self._host} <= self._infos.keys()
        self._device.check_integrity()
        self._host.check_integrity()


def _read_unchanged(read: Callable[[], Adapter], name: str, digests: dict[str, bytes]) -> Adapter:
    """Read an adapter. Raises CheckpointError if it is not the one that was read first."""
    adapter = read()
    if digests.setdefault(name, adapter.digest) != adapter.digest:
        raise CheckpointError(
            f"{adapter.info.folder}: has changed since adapter {name!r} was first read; restore its files, or give the "
            "new ones to an engine under a name of their own."
        )
    return adapter
