"""Metrics of the ledger of memory: who has reserved how much of which memory."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxinfer.serving.budget import all_budgets


class MemoryFamilies(Collector):
    """Makes the families of all memories that something was reserved of."""

    def collect(self) -> Iterator[Metric]:
        """Yield both families."""
        capacity = GaugeMetricFamily(
            "jaxinfer_memory_capacity_bytes", "Bytes of a memory; absent where unknown.", labels=["memory"]
        )
        reserved = GaugeMetricFamily(
            "jaxinfer_memory_reserved_bytes",
            "Bytes that an owner has reserved for a use.",
            labels=["memory", "owner", "tenant"],
        )
        for budget in all_budgets():
            if budget.capacity is not None:
                capacity.add_metric([budget.name], budget.capacity)
            held = Counter[tuple[str, str]]()  # two owners may have the same name
            for holding in budget.holdings:
                held[holding.owner, holding.tenant] += holding.bytes
            for (owner, tenant), size in held.items():
                reserved.add_metric([budget.name, owner, tenant], size)
        yield capacity
        yield reserved
