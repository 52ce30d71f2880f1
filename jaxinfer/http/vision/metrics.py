"""Metrics of systems of experts and elastic services, read at each scrape."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxinfer.elastic.answers import QueryStatistics
from jaxinfer.elastic.service import Service
from jaxinfer.experts.scheduling.executor_state import ExpertStatistics
from jaxinfer.experts.system import System
from jaxinfer.http.vision.served import ServedService, ServedSystem
from jaxinfer.serving.statistics import Statistics

_OUTCOMES = ("answered", "shed", "cancelled", "failed")

type _Value = float | Mapping[str, float]
"""A value, or one for each value of a label."""


class _FamiliesByModel[Stats: Statistics]:
    """Makes families with a series, or several, of each of what is served.

    Args:
      prefix: what their names begin with.
      read: the statistics by the model's name.
    """

    def __init__(self, prefix: str, read: Mapping[str, Stats]):
        self._prefix, self._read = prefix, read

    def counter(self, name: str, help: str, value: Callable[[Stats], _Value], label: str | None = None) -> Metric:
        """A counter; label: that of a mapping's keys."""
        return self._filled(CounterMetricFamily(f"{self._prefix}_{name}", help, labels=_labels(label)), value)

    def gauge(self, name: str, help: str, value: Callable[[Stats], _Value], label: str | None = None) -> Metric:
        """A gauge; label: that of a mapping's keys."""
        return self._filled(GaugeMetricFamily(f"{self._prefix}_{name}", help, labels=_labels(label)), value)

    def _filled[Family: CounterMetricFamily | GaugeMetricFamily](
        self, family: Family, value: Callable[[Stats], _Value]
    ) -> Family:
        for model, stats in self._read.items():
            given = value(stats)
            for key, each in given.items() if isinstance(given, Mapping) else [(None, given)]:
                family.add_metric([model] if key is None else [model, key], each)
        return family

    def ended(self, name: str, help: str) -> Metric:
        """A counter of requests by how they ended."""
        return self.counter(
            name, help, lambda stats: {outcome: getattr(stats, outcome) for outcome in _OUTCOMES}, "outcome"
        )


def _labels(label: str | None) -> Sequence[str]:
    return ["model"] if label is None else ["model", label]


def _waiting(name: str, what: str, loaded: Mapping[str, System | Service]) -> Metric:
    """A gauge of what each model has not ended."""
    gauge = GaugeMetricFamily(name, f"{what} that have not ended, running or waiting.", labels=["model"])
    for model, served in loaded.items():
        gauge.add_metric([model], served.num_requests)
    return gauge


class SystemFamilies(Collector):
    """Makes the families of systems of experts; those that are not loaded have no series."""

    def __init__(self, systems: Iterable[ServedSystem]):
        self._systems = tuple(systems)

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        loaded = {served.name: served.system for served in self._systems if served.is_loaded}
        made = _FamiliesByModel[ExpertStatistics](
            "jaxinfer_experts", {name: system.stats() for name, system in loaded.items()}
        )
        yield made.ended("inputs_ended", "Inputs that ended, by how.")
        yield made.counter("stages", "Inputs judged by an expert.", lambda stats: stats.requests)
        yield made.counter("batches", "Batches of inputs.", lambda stats: stats.batches)
        yield made.counter(
            "loads",
            "Experts loaded after the start, by where they came from.",
            lambda stats: {source: stats.loads[source] for source in ("disk", "host")},
            "source",
        )
        yield made.counter("evictions", "Experts that left an executor's memory.", lambda stats: stats.evictions)
        yield made.gauge("usage", "Share of recent inputs that reach an expert.", lambda stats: stats.usage, "expert")
        yield _waiting("jaxinfer_experts_inputs_waiting", "Inputs", loaded)


class ServiceFamilies(Collector):
    """Makes the families of elastic services; those that are not loaded have no series."""

    def __init__(self, services: Iterable[ServedService]):
        self._services = tuple(services)

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        loaded = {served.name: served.service for served in self._services if served.is_loaded}
        made = _FamiliesByModel[QueryStatistics](
            "jaxinfer_elastic", {name: service.stats() for name, service in loaded.items()}
        )
        yield made.ended("queries_ended", "Queries that ended, by how.")
        yield made.counter("late_answers", "Answers after their deadlines.", lambda stats: stats.late)
        yield made.counter("batches", "Batches of queries.", lambda stats: stats.batches)
        yield made.counter(
            "answers",
            "Queries answered, by level.",
            lambda stats: {str(level): count for level, count in sorted(stats.levels.items())},
            "level",
        )
        yield made.counter("utility", "Utility of the queries answered in time.", lambda stats: stats.utility)
        yield _waiting("jaxinfer_elastic_queries_waiting", "Queries", loaded)
