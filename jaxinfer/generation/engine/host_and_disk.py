"""Pages of the prefix cache in two tiers: the host's memory, and a disk behind it."""

from collections import Counter
from collections.abc import Sequence

from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.disk_pages import DiskPages
from jaxinfer.generation.engine.host_pages import HostPages
from jaxinfer.generation.engine.page_tier import Load, PageTier, TierStats


class HostAndDisk(PageTier):
    """Pages go to both, and come from the host if it has them.

    So nothing has to move when the host forgets a page. A page that has come from disk to the devices goes to the host
    when it gives way.
    """

    def __init__(self, host: HostPages, disk: DiskPages):
        self.host, self.disk = host, disk

    def __contains__(self, key: bytes) -> bool:
        return key in self.host or key in self.disk

    def wants(self, key: bytes) -> bool:
        return self.host.wants(key) or self.disk.wants(key)

    def wants_early(self, key: bytes) -> bool:
        return self.disk.wants_early(key)

    @property
    def has_room(self) -> bool:
        return self.disk.has_room

    def put(self, keys: Sequence[bytes], blocks: Sequence[PageBlock]) -> None:
        self.host.put(keys, blocks)
        self.disk.put(keys, blocks)

    def get(self, keys: Sequence[bytes]) -> Load:
        from_disk = self._from_disk(keys)
        if len(from_disk) == len(keys):
            return self.disk.get(keys)
        load = self.host.get(keys)
        return self.disk.get(keys, load._replace(from_disk=from_disk)) if from_disk else load

    def _from_disk(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        return frozenset(key for key in keys if key not in self.host)

    def reads(self, keys: Sequence[bytes]) -> Counter[str]:
        from_disk = self._from_disk(keys)
        return self.host.reads([key for key in keys if key not in from_disk]) + self.disk.reads([*from_disk])

    def forget(self, keys: Sequence[bytes]) -> None:
        self.host.forget(keys)
        self.disk.forget(keys)

    def admitted(self, load: Load, keys: Sequence[bytes]) -> None:
        from_disk = [key for key in keys if key in load.from_disk]
        for tier, got in ((self.host, [key for key in keys if key not in load.from_disk]), (self.disk, from_disk)):
            if got:
                tier.admitted(load, got)

    @property
    def stats(self) -> dict[str, TierStats]:
        return self.host.stats | self.disk.stats

    def free_memory(self) -> None:
        self.host.free_memory()
        self.disk.free_memory()

    def settle(self) -> None:
        self.host.settle()
        self.disk.settle()

    def check_integrity(self) -> None:
        self.host.check_integrity()
        self.disk.check_integrity()

    def close(self) -> None:
        self.host.close()
        self.disk.close()
