"""Traces are what shares and probabilities say, are equal for equal seeds, and survive a file."""

from collections import Counter

import pytest

from jaxinfer.evaluation.experts.workloads import draw_kinds, draw_trace, read_trace
from jaxinfer.evaluation.traces import write_trace
from jaxinfer.experts.errors import ConfigError, RoutingError
from jaxinfer.experts.scheduling.experts import ExpertGraph, InputKind, Rule
from tests.experts.systems import expert


def graph(*rules):
    inputs = [InputKind(name="often", expert="a", share=0.75), InputKind(name="seldom", expert="b", share=0.25)]
    return ExpertGraph([expert(name) for name in "abcd"], inputs, rules)


CHAIN = (
    Rule(expert="a", verdict="ok", next="c", probability=0.5),
    Rule(expert="a", verdict="odd", next="d", probability=0.3),
    Rule(expert="c", verdict="ok", next="d", probability=1.0),
)


def test_traces_are_what_the_graph_expects():
    board = graph(*CHAIN)
    trace = draw_trace(board, 4000, interval=0.25, seed=3)
    assert [item.arrival for item in trace[:3]] == [0.0, 0.25, 0.5]
    used = Counter(name for item in trace for name in item.experts)
    for name, usage in board.usage.items():
        assert used[name] / len(trace) == pytest.approx(usage, abs=0.03)
    assert {item.experts for item in trace} == {("a",), ("a", "d"), ("a", "c", "d"), ("b",)}


def test_rules_without_chances_are_equally_probable():
    rules = [Rule(expert="a", verdict=verdict, next=verdict) for verdict in "cd"]
    used = Counter(item.experts for item in draw_trace(graph(*rules), 1000) if item.experts[0] == "a")
    assert used.keys() == {("a", "c"), ("a", "d")}
    assert used["a", "c"] == pytest.approx(used["a", "d"], rel=0.2)


def test_equal_seeds_are_equal_traces():
    board = graph(*CHAIN)
    assert draw_trace(board, 50, seed=1) == draw_trace(board, 50, seed=1) != draw_trace(board, 50, seed=2)
    first = [board.first(kind) for kind in draw_kinds(board, 50, seed=1)]
    assert first == [item.experts[0] for item in draw_trace(board, 50, seed=1)]
    assert draw_trace(board, 0) == []
    with pytest.raises(ConfigError, match="interval"):
        draw_trace(board, 1, interval=-1.0)


def test_files(tmp_path):
    board, file = graph(*CHAIN), tmp_path / "trace.jsonl"
    trace = draw_trace(board, 20, interval=0.1)
    write_trace(file, trace)
    assert read_trace(file, board) == trace
    for text, error, message in (
        ('{"arrival": 0}', ValueError, "trace.jsonl:1: not an input .*experts"),
        ('{"arrival": 0, "experts": []}', ValueError, "trace.jsonl:1: .*needs an expert"),
        ('{"arrival": 0, "experts": ["a"], "task": "b"}', ValueError, "trace.jsonl:1: .*unknown fields: task"),
        ('{"arrival": 1, "experts": ["a"]}\n{"arrival": 0, "experts": ["a"]}', ValueError, "trace.jsonl:2: .*before"),
        ('{"arrival": 0, "experts": ["z"]}', RoutingError, "'z'"),
    ):
        file.write_text(text)
        with pytest.raises(error, match=message):
            read_trace(file, board)
    with pytest.raises(ValueError, match="No such file or directory; name a trace"):
        read_trace(tmp_path / "none", board)
