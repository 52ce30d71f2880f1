"""Who has memory, as metrics: the ledger, and the models that make room for each other."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxinfer.http.served_model import State
from jaxinfer.http.served_models import ServedModels
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


class ResidencyFamilies(Collector):
    """Makes the families that tell which models have memory, and how often that changed.

    Args:
      models: the models of the server.
    """

    def __init__(self, models: ServedModels):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        states = GaugeMetricFamily(
            "jaxinfer_model_state", "Whether a model is in a state: 1, or 0.", labels=["model", "state"]
        )
        for model in self._models.distinct:
            for state in State:
                states.add_metric([model.name, state.value], float(model.state is state))
        yield states
        residency = self._models.residency
        yield CounterMetricFamily("jaxinfer_model_switches", "Models woken up for a request.", residency.switches)
        yield CounterMetricFamily(
            "jaxinfer_model_switch_seconds", "Seconds that waking models up took, in all.", residency.switch_seconds
        )
