"""OpenTelemetry traces: a span for each request of a model, by the semantic conventions of generative AI."""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxinfer.http.records import Record

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/experts/infer": "experts",  # these two are no operations of the conventions
    "/v1/elastic/query": "elastic",
}
"""Paths whose requests have spans -> `gen_ai.operation.name`."""

TIMEOUT = 2.0
"""Seconds that a collector has to take spans; the end of the server waits for it."""


class Traces:
    """A sink of records that sends spans to a collector, in a thread of its own. Spans continue clients' traces.

    Args:
      endpoint: the collector's URL, as in OTEL_EXPORTER_OTLP_ENDPOINT: "/v1/traces" is added.
    """

    def __init__(self, endpoint: str):
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT)
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxinfer"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxinfer.http")
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, record: Record) -> None:
        """Send the span of a request that has ended."""
        if (operation := OPERATIONS.get(record.path)) is None:
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in record.headers.items()}
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxinfer",
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "http.request.method": record.method,
            "http.response.status_code": record.status,
            "url.path": record.path,
            "jaxinfer.inputs": record.inputs,
            "jaxinfer.request_id": record.id,
        }
        span = self._tracer.start_span(
            operation if record.model is None else f"{operation} {record.model}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {name: value for name, value in attributes.items() if value is not None},
            start_time=round(1e9 * record.began),
        )
        if record.status >= 500 or not record.complete:
            span.set_status(StatusCode.ERROR)
        span.end(round(1e9 * (record.began + record.seconds)))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
