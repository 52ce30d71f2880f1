"""Which LoRA adapter is where on the device, and which stay in host memory; has no device array itself."""

import dataclasses
import os

from jaxinfer.generation.lora.adapter_info import AdapterInfo
from jaxinfer.generation.lora.peft import Adapter, read_adapter
from jaxinfer.models.config import DecoderConfig


@dataclasses.dataclass
class _Resident:
    """An adapter on the device, and how many requests use it."""

    index: int
    pins: int = 0


class AdapterCache:
    """Brings adapters to the device as requests need them, through host memory, and evicts the least recently used.

    Args:
      size: how many adapters the device has at once, at indices from 1; 0 stands for no adapter.
      max_rank: the rank that is reserved for each.
      host_bytes: how much of host memory may keep adapters that have been read; the last one read stays in any case.
      family: the model's, as for `read_adapter`.
      config: the model's.
    """

    def __init__(self, size: int, max_rank: int, host_bytes: int, family: str, config: DecoderConfig):
        for name, value in (("size", size), ("max_rank", max_rank)):
            if value < 1:
                raise ValueError(f"{name}={value}: adapters need at least 1.")
        self.size, self.max_rank, self.host_bytes = size, max_rank, host_bytes
        self._family, self._config = family, config
        self._infos: dict[str, AdapterInfo] = {}
        self._empty = list(range(size, 0, -1))
        self._residents: dict[str, _Resident] = {}  # the one released longest ago first
        self._uploads: list[tuple[int, Adapter]] = []
        self._host: dict[str, Adapter] = {}  # the one placed longest ago first

    def register(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Make an adapter known. Only its config is read; ValueError if that alone says that it cannot be used."""
        if name in self._infos:
            raise ValueError(f"adapter {name!r} is {self._infos[name].folder} already; choose another name.")
        info = AdapterInfo.read(folder)
        info.require_rank(self.max_rank)
        self._infos[name] = info

    def check(self, name: str) -> None:
        """Raise ValueError if no adapter has this name."""
        if name not in self._infos:
            known = ", ".join(sorted(self._infos)) or "none"
            raise ValueError(f"unknown adapter {name!r}; known: {known}.")

    def acquire(self, name: str) -> int | None:
        """The adapter's index, which stays until `release`; None while requests use all for other adapters.

        Raises ValueError if the adapter is unknown or cannot be read; then nothing has changed.
        """
        self.check(name)
        if name not in self._residents:
            evicted = None if self._empty else self._least_recently_used()
            if not self._empty and evicted is None:
                return None
            adapter = self._read(name)
            index = self._empty.pop() if evicted is None else self._residents.pop(evicted).index
            self._residents[name] = _Resident(index)
            self._uploads.append((index, adapter))
        resident = self._residents[name]
        resident.pins += 1
        return resident.index

    def take_uploads(self) -> tuple[tuple[int, Adapter], ...]:
        """(index, adapter) that must be placed on the device, in order, before a batch runs; the caller does so.

        The linears that an adapter does not name must become zero.
        """
        uploads, self._uploads = tuple(self._uploads), []
        return uploads

    def clear(self) -> None:
        """Forget what is on the device, where no request uses it: it is placed anew when it is needed."""
        assert not any(resident.pins for resident in self._residents.values())
        self._empty = list(range(self.size, 0, -1))
        self._residents.clear()
        self._uploads.clear()

    def release(self, name: str) -> None:
        """Undo one `acquire`. The adapter stays until another one needs its place."""
        if name not in self._residents or not self._residents[name].pins:
            raise ValueError(f"adapter {name!r} was released more often than acquired.")
        resident = self._residents.pop(name)
        resident.pins -= 1
        self._residents[name] = resident

    def _least_recently_used(self) -> str | None:
        return next((name for name, resident in self._residents.items() if not resident.pins), None)

    def _read(self, name: str) -> Adapter:
        """From host memory or else from disk; the adapters placed longest ago make room for it."""
        adapter = self._host.pop(name, None)
        if adapter is None:
            folder = self._infos[name].folder
            adapter = read_adapter(folder, self._family, self._config, max_rank=self.max_rank)
        self._host[name] = adapter
        while len(self._host) > 1 and self._host_use() > self.host_bytes:
            del self._host[next(iter(self._host))]
        return adapter

    def _host_use(self) -> int:
        return sum(adapter.nbytes for adapter in self._host.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless every place is empty or has one adapter, and host memory is within its bound."""
        places = [*self._empty, *(resident.index for resident in self._residents.values())]
        assert sorted(places) == list(range(1, self.size + 1)), f"places lost or doubled: {sorted(places)}"
        assert all(resident.pins >= 0 for resident in self._residents.values())
        assert self._residents.keys() | self._host.keys() <= self._infos.keys()
        assert len(self._host) <= 1 or self._host_use() <= self.host_bytes
