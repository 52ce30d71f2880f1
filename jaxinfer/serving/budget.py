"""Whose memory it is: a budget for each device and one for the host, which all tenants draw on."""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from rich.filesize import decimal

if TYPE_CHECKING:
    from rich.table import Table


class Offer(NamedTuple):
    """What a tenant would give back of its memory.

    Attributes:
      bytes: how many.
      seconds: what it would take to have again what is in them.
    """

    bytes: int
    seconds: float


class Holding(NamedTuple):
    """What a tenant has of a memory.

    Attributes:
      tenant: its name, such as "KV pages".
      bytes: all of it.
      offer: what it would give back; nothing of what is pinned.
    """

    tenant: str
    bytes: int
    offer: Offer


@dataclasses.dataclass(frozen=True, eq=False)
class Reservation:
    """Bytes of a budget, until they are released.

    Attributes:
      tenant: who has them.
      bytes: how many.
      offer: says what of them would be given back now; None: they are pinned.
    """

    tenant: str
    bytes: int
    offer: Callable[[], Offer] | None = None


class BudgetError(MemoryError):
    """A memory has too little free; the text says who has it."""


class Budget:
    """The memory of a device, or of the host: who has how much of it. Threads may share one.

    What was reserved never exceeds the capacity; a reservation that does not fit changes nothing.

    Args:
      name: of the memory, such as "cpu:0" or "host".
      capacity: in bytes; None: not known, and so without a limit.
    """

    def __init__(self, name: str, capacity: int | None):
        if capacity is not None and capacity < 0:
            raise ValueError(f"the capacity of {name} must be at least 0 bytes, got {capacity}.")
        self.name, self.capacity = name, capacity
        self._reservations: list[Reservation] = []
        self._lock = threading.Lock()

    @property
    def reserved(self) -> int:
        """Bytes that all tenants have together."""
        return sum(reservation.bytes for reservation in list(self._reservations))

    @property
    def free(self) -> int | None:
        """Bytes that nobody has; None: not known."""
        return None if self.capacity is None else self.capacity - self.reserved

    def reserve(self, tenant: str, size: int, *, offer: Callable[[], Offer] | None = None) -> Reservation:
        """Take bytes until `release`.

        Args:
          tenant: who takes them; it may have several reservations.
          size: in bytes.
          offer: says what of them would be given back now; None: they are pinned.
        Raises BudgetError if so many are not free, which says who has what; ValueError for less than 0 bytes.
        """
        if size < 0:
            raise ValueError(f"{tenant} must take at least 0 bytes of {self.name}, got {size}.")
        reservation = Reservation(tenant, size, offer)
        with self._lock:
            fits = self.free is None or size <= self.free
            if fits:
                self._reservations.append(reservation)
        if not fits:
            raise BudgetError(f"{tenant} would take {decimal(size)} of {self.name}, which has too little free.\n{self}")
        return reservation

    def reserve_all(self, sizes: Mapping[str, int]) -> None:
        """Take pinned bytes for several tenants, those that need none left out. Raises as `reserve`."""
        for tenant, size in sizes.items():
            if size:
                self.reserve(tenant, size)

    def release(self, reservation: Reservation) -> None:
        """Give bytes back. Raises ValueError if they were not reserved, or given back before."""
        with self._lock:
            self._reservations.remove(reservation)

    @property
    def holdings(self) -> list[Holding]:
        """What each tenant has, in the order in which they came."""
        parts: dict[str, list[Reservation]] = {}
        for reservation in list(self._reservations):
            parts.setdefault(reservation.tenant, []).append(reservation)
        return [_holding(tenant, of_tenant) for tenant, of_tenant in parts.items()]

    def table(self) -> "Table":
        """Who has what, for `rich` to print."""
        from rich.table import Table

        table = Table("tenant", title=f"{self.name}: {self._summary()}", title_justify="left")
        for column in ("bytes", "pinned", "evictable", "s to have again"):
            table.add_column(column, justify="right")
        for tenant, size, (evictable, seconds) in self.holdings:
            cost = f"{seconds:.3g}" if evictable else ""
            table.add_row(tenant, decimal(size), decimal(size - evictable), decimal(evictable), cost)
        return table

    def _summary(self) -> str:
        reserved = f"{decimal(self.reserved)} reserved"
        return reserved if self.capacity is None else f"{reserved} of {decimal(self.capacity)}"

    def __str__(self) -> str:
        rows = (
            f"  {tenant}: {decimal(size)}, {decimal(size - offer.bytes)} pinned and {decimal(offer.bytes)} evictable"
            for tenant, size, offer in self.holdings
        )
        return "\n".join([f"{self.name}: {self._summary()}", *rows])


def _holding(tenant: str, reservations: list[Reservation]) -> Holding:
    offers = [reservation.offer() for reservation in reservations if reservation.offer is not None]
    offer = Offer(sum(each.bytes for each in offers), sum(each.seconds for each in offers))
    return Holding(tenant, sum(reservation.bytes for reservation in reservations), offer)
