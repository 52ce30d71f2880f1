"""One format for all that comes: lines with the fields of their class, in the order of arrival."""

import json

import pytest

from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.evaluation.experts import TraceRequest
from jaxinfer.evaluation.traces import read_trace, write_trace

INPUTS = [TraceRequest(arrival=at, experts=tuple(route)) for at, route in ((0.0, "ab"), (0.1 + 0.2, "a"))]
QUERIES = [Query(id=n, task="a", arrival=0.1 * n, latency=0.3, utility=1.0, payload=n) for n in range(3)]


@pytest.mark.parametrize(("items", "kind"), [(INPUTS, TraceRequest), (QUERIES, Query), ([], Query)])
def test_what_is_written_is_read(tmp_path, items, kind):
    write_trace(tmp_path / "trace.jsonl", items[::-1])
    assert read_trace(tmp_path / "trace.jsonl", kind, name="an item") == items
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["arrival"] for line in lines] == [item.arrival for item in items]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "not a query .*truncated"),
        ("[1]", "not a query .*Expected `object`"),
        ('{"id": 0, "task": "a"}', "not a query .*missing required field"),
        ('{"arrival": 0, "experts": ["a"]}', "not a query .*unknown fields: experts"),
        ('{"id": 0, "task": "a", "arrival": 9, "latency": -1, "utility": 1}', "not a query .*>= 0"),
        ('{"id": 0, "task": "a", "arrival": 0.0, "latency": 1, "utility": 1}', "arrives before the line above does"),
    ],
)
def test_what_is_no_trace(tmp_path, line, problem):
    file = tmp_path / "trace.jsonl"
    write_trace(file, QUERIES[1:2])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ValueError, match=f"trace.jsonl:2: {problem}"):
        read_trace(file, Query, name="a query")


def test_a_trace_that_cannot_be_written_leaves_no_file(tmp_path):
    with pytest.raises(TypeError, match="unsupported"):
        write_trace(tmp_path / "trace.jsonl", [TraceRequest(arrival=0.0, experts=(object(),))])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
