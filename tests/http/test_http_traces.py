"""Each request of a model is a span at the collector, in the trace of its client."""

import asyncio
import http.server
import threading

import pytest

pytest.importorskip("starlette")
pytest.importorskip("opentelemetry.sdk")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    """A server of OTLP; `spans` reads what it got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers.get("Content-Encoding"), content))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    def spans():
        assert {(path, coding) for path, coding, _ in got} == {("/v1/traces", None)}
        requests = [ExportTraceServiceRequest.FromString(content) for _, _, content in got]
        return [span for request in requests for a in request.resource_spans for b in a.scope_spans for span in b.spans]

    got = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.spans = spans
        yield server
        server.shutdown()


def attributes_of(span):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_spans_of_requests(async_llm, collector):
    from jaxinfer.http.limits import Limits
    from jaxinfer.http.served_model import ServedModel
    from jaxinfer.http.served_models import ServedModels
    from jaxinfer.http.server import make_app
    from jaxinfer.http.traces import Traces
    from tests.http.asgi import Client

    traces = Traces(f"http://127.0.0.1:{collector.server_port}/")
    model = ServedModel("tiny", lambda asleep: async_llm)
    model.load()
    client = Client(make_app(ServedModels([model]), Limits(), [traces]))

    async def main():
        body = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        for path, options in (("/v1/completions", {"headers": headers}), ("/v1/embeddings", {})):
            answer = await client.post(path, body, **options)
            await answer.body()
            await answer.task
        await (await client.get("/health")).body()

    asyncio.run(asyncio.wait_for(main(), 120))
    traces.close()
    completion, embedding = collector.spans()  # of /health there is none
    assert (completion.name, completion.trace_id.hex(), completion.parent_span_id.hex()) == (
        "text_completion tiny",
        TRACE,
        PARENT,
    )
    assert completion.start_time_unix_nano < completion.end_time_unix_nano
    assert attributes_of(completion) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jaxinfer",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "jaxinfer.request_id": "mine",
    }
    assert (embedding.name, embedding.parent_span_id) == ("embeddings", b"")  # refused before its model is known
    assert attributes_of(embedding)["http.response.status_code"] == 400
