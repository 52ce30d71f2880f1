"""Metrics of a server, in Prometheus' text format."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
    exposition,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.page_tier import TierStats
from jaxinfer.generation.engine.stats import EngineStats
from jaxinfer.generation.outputs import FinishReason, RequestOutput
from jaxinfer.http.served_model import ServedModel
from jaxinfer.serving import ServingError

ALIASES = {
    "vllm:num_requests_running": "jaxinfer_requests_running",
    "vllm:num_requests_waiting": "jaxinfer_requests_waiting",
    "vllm:kv_cache_usage_perc": "jaxinfer_kv_cache_usage",
    "vllm:cache_config_info": "jaxinfer_kv_cache_info",
    "vllm:prefix_cache_queries": "jaxinfer_prompt_tokens",
    "vllm:prefix_cache_hits": "jaxinfer_cached_prompt_tokens",
    "vllm:time_to_first_token_seconds": "jaxinfer_time_to_first_token_seconds",
    "vllm:admission_rejections": "jaxinfer_admission_rejections",
    "vllm:lora_requests_info": "jaxinfer_lora_requests_info",
}
"""Names that gateways and dashboards read -> our own families. Counters' samples end in `_total`, under both names."""

ALIAS_LABELS = {
    "model": "model_name",
    "page_tokens": "block_size",
    "pages": "num_gpu_blocks",
    "running": "running_lora_adapters",
    "waiting": "waiting_lora_adapters",
    "most": "max_lora",
}
"""Our labels -> those of the aliases."""

# Upper bounds in seconds.
_TO_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOTAL = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Metrics of a server. Its methods may be called from any thread.

    The engines are read at each scrape. Before a model is loaded, and once it has closed, a scrape shows the other
    metrics only.

    Args:
      models: the models; their names are the label `model` of each metric.
      collectors: makers of other families.
    """

    def __init__(self, models: Iterable[ServedModel], collectors: Iterable[Collector] = ()):
        def histogram(metric: str, help: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(metric, help, ["model"], buckets=bounds, registry=None)

        first = histogram(
            "jaxinfer_time_to_first_token_seconds",
            "Seconds from a request to a completion's first token.",
            _TO_FIRST_TOKEN,
        )
        total = histogram("jaxinfer_request_seconds", "Seconds from a request to a completion's last token.", _TOTAL)
        token = histogram(
            "jaxinfer_time_per_output_token_seconds",
            "Mean seconds of a completion's tokens after its first.",
            _PER_TOKEN,
        )
        responses = Counter(
            "jaxinfer_http_responses", "HTTP responses.", ["model", "endpoint", "status"], registry=None
        )
        rejections = Counter(
            "jaxinfer_admission_rejections", "Requests refused with status 429.", ["model"], registry=None
        )
        models = list(models)
        for model in models:
            for metric in (first, total, token, rejections):
                metric.labels(model.name)  # makes a series, which shows 0 from the start
        self._first, self._total, self._token = first, total, token
        self._rejections, self._responses = rejections, responses
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        for collector in (_Families(models, [first, total, token, responses, rejections]), *collectors):
            self._registry.register(collector)

    def ended(self, model: str, output: RequestOutput) -> None:
        """Count the seconds of a request's completions. Call it once a request, with its last output."""
        for completion in output.outputs:
            timings = completion.timings
            self._total.labels(model).observe(timings.total_s)
            if timings.first_token_s is not None:
                self._first.labels(model).observe(timings.first_token_s)
            if timings.tokens_per_s:
                self._token.labels(model).observe(1 / timings.tokens_per_s)

    def responded(self, model: str, endpoint: str, status: int) -> None:
        """Count a response.

        Args:
          model: the model that was asked; empty if the request named none. Not the client's text: each value is kept.
          endpoint: the path of its route, such as "/v1/models/{model}". Not the client's path: each value is kept.
          status: its HTTP status.
        """
        self._responses.labels(model, endpoint, str(status)).inc()
        if status == 429:
            self._rejections.labels(model).inc()

    def expose(self) -> tuple[bytes, str]:
        """Return all metrics as text, and its content type."""
        return exposition.generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Families(Collector):
    """Makes the families of a scrape: the engines', the server's, and the aliases of both.

    Args:
      models: the models.
      metrics: the server's own histograms and counters.
    """

    def __init__(self, models: Sequence[ServedModel], metrics: Sequence[Counter | Histogram]):
        self._models, self._metrics = models, metrics

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        families: dict[str, Metric] = {}
        for model in self._models:
            for family in _Engine(model).collect():
                families.setdefault(family.name, _empty(family)).samples.extend(family.samples)
        families |= {family.name: family for family in self._server()}
        yield from families.values()
        for alias, name in ALIASES.items():
            if name in families:
                yield _renamed(families[name], alias)

    def _server(self) -> Iterator[Metric]:
        for metric in self._metrics:
            yield from metric.collect()


class _Engine:
    """Makes the families of a model's engine."""

    def __init__(self, model: ServedModel):
        self._model, self._name = model, model.name

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine counts; nothing before it is loaded, and once it has closed."""
        try:
            llm = self._model.llm
            stats, config = llm.stats(), llm.engine.config
        except ServingError:
            return
        yield from self._gauges(stats)
        if isinstance(config, EngineConfig):  # an encoder has no cache
            sizes = {"page_tokens": str(config.page_size), "pages": str(stats.num_pages)}
            yield self._gauge("kv_cache_info", "Sizes of the KV cache, as labels; the value is 1.", 1, sizes)
        if isinstance(config, EngineConfig) and config.max_adapters:
            names = {"running": stats.running_adapters, "waiting": stats.waiting_adapters}
            adapters = {key: ",".join(sorted(value)) for key, value in names.items()}
            about = "LoRA adapters of requests, as labels; the value is the time in seconds since 1970."
            labels = {"most": str(config.max_adapters), **adapters}
            yield self._gauge("lora_requests_info", about, time.time(), labels)
        yield from self._counters(stats)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("requests_running", "Completions that run.", stats.running)
        yield self._gauge("requests_waiting", "Completions that have not begun.", stats.waiting)
        yield self._gauge("kv_pages_used", "Pages of the KV cache that running completions have.", stats.used_pages)
        yield self._gauge("kv_pages", "Pages of the KV cache.", stats.num_pages)
        usage = stats.used_pages / stats.num_pages if stats.num_pages else 0.0
        for tier, kept in _tiers(stats):
            yield self._gauge(f"{tier}_kv_pages_kept", f"Pages of the KV cache that the {tier} keeps.", kept.pages)
        yield self._gauge("kv_cache_usage", "Share of the KV cache's pages in use, from 0 to 1.", usage)

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Tokens of the prompts that have begun.", stats.prompt_tokens)
        yield self._counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.", stats.cached_tokens)
        yield self._counter("generated_tokens", "Output tokens.", stats.generated_tokens)
        yield self._counter("draft_tokens", "Tokens that the n-gram proposer suggested.", stats.draft_tokens)
        yield self._counter("accepted_tokens", "Suggested tokens that were right.", stats.accepted_tokens)
        yield self._counter("preemptions", "Completions that gave their pages to another.", stats.preemptions)
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)
        yield self._counter("compile_misses", "Programs compiled while a step waited.", stats.compile_misses)
        for tier, kept in _tiers(stats):
            pages = {"stored": kept.stored, "read_back": kept.read_back}
            sizes = {"stored": kept.stored_bytes, "read_back": kept.read_back_bytes}
            name = f"{tier}_kv"
            yield self._counters_by("moved", f"{name}_pages", f"Pages of the KV cache to and from the {tier}.", pages)
            yield self._counters_by("moved", f"{name}_bytes", "Bytes of these pages.", sizes)
            ends = {"front": kept.read_back - kept.from_back, "back": kept.from_back}
            help = "Pages that came back, from the front of a prompt, or from its back while the front was computed."
            yield self._counters_by("end", f"{name}_restored_pages", help, ends)
            yield self._counter(f"{name}_hits", f"Completions that got pages from the {tier}.", kept.hits)
            yield self._counter(f"{name}_wait_seconds", "Seconds until they got these pages.", kept.waited)
        reasons = {reason.value: stats.ended.get(reason, 0) for reason in FinishReason}
        yield self._counters_by("reason", "completions_ended", "Completions that ended, by why.", reasons)
        if (requests := stats.requests) is not None:
            fields = ("answered", "shed", "cancelled", "failed")  # each request is in one; late ones are answered, too
            outcomes = {field: getattr(requests, field) for field in fields}
            yield self._counters_by("outcome", "requests_ended", "Requests that ended, by how.", outcomes)

    def _gauge(self, name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        labels = {"model": self._name, **(labels or {})}
        family = GaugeMetricFamily(f"jaxinfer_{name}", help, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"jaxinfer_{name}", help, labels=["model"])
        family.add_metric([self._name], value)
        return family

    def _counters_by(self, label: str, name: str, help: str, values: Mapping[str, int]) -> Metric:
        """A counter with one series for each value of a label."""
        family = CounterMetricFamily(f"jaxinfer_{name}", help, labels=["model", label])
        for key, value in values.items():
            family.add_metric([self._name, key], value)
        return family


def _tiers(stats: EngineStats) -> list[tuple[str, TierStats]]:
    """The tiers of the KV cache, by name."""
    tiers = {"host": stats.host_kv, "disk": stats.disk_kv}
    return [(name, kept) for name, kept in tiers.items() if kept is not None]


def _empty(family: Metric) -> Metric:
    """A family without values."""
    return Metric(family.name, family.documentation, family.type)


def _renamed(family: Metric, alias: str) -> Metric:
    """A family's values under another name, with the labels of the aliases."""
    renamed = Metric(alias, family.documentation, family.type)
    renamed.samples = [
        sample._replace(
            name=alias + sample.name.removeprefix(family.name),
            labels={ALIAS_LABELS.get(label, label): value for label, value in sample.labels.items()},
        )
        for sample in family.samples
    ]
    return renamed
