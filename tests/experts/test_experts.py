"""Experts, inputs and rules: how often each expert is used, and what is refused."""

import functools

import pytest

from jaxinfer.experts.errors import ConfigError, RoutingError
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo, InputKind, Rule


def experts(names):
    return [ExpertInfo(name=name, architecture="resnet", bytes=10) for name in names]


def kinds(**shares):
    return [InputKind(name=name, expert=name, share=share) for name, share in shares.items()]


def rule(expert, following, probability=1.0, verdict="ok"):
    return Rule(expert=expert, verdict=verdict, next=following, probability=probability)


def test_usage_follows_the_rules():
    """Of a classifier's inputs those that are well go on to the detector that it shares with another one."""
    graph = ExpertGraph(experts("abd"), kinds(a=0.75, b=0.25), [rule("a", "d", 0.9), rule("b", "d", 0.5)])
    assert graph.usage == pytest.approx({"a": 0.75, "b": 0.25, "d": 0.75 * 0.9 + 0.25 * 0.5})
    assert graph.by_usage == ["d", "a", "b"]
    assert graph.predecessors == {"a": frozenset(), "b": frozenset(), "d": {"a", "b"}}
    assert graph.successors == {"a": {"d"}, "b": {"d"}, "d": frozenset()}


def test_usage_along_a_chain_and_two_ways():
    graph = ExpertGraph(
        experts("abcd"), kinds(a=1), [rule("a", "b", 0.5), rule("a", "c", 0.5, "no"), rule("b", "d"), rule("c", "d")]
    )
    assert graph.usage == pytest.approx({"a": 1, "b": 0.5, "c": 0.5, "d": 1})


def test_routes():
    graph = ExpertGraph(experts("ad"), [InputKind(name="screw", expert="a")], [rule("a", "d")])
    assert graph.first("screw") == "a"
    assert graph.next("a", "ok") == "d"
    assert graph.next("a", "broken") is None
    assert graph.next("d", "ok") is None
    with pytest.raises(RoutingError, match="unknown kind of input 'nail'; known: screw"):
        graph.first("nail")
    with pytest.raises(RoutingError, match="there is no expert 'z'; known: a, d"):
        graph.require("z")


def test_shares_that_are_not_1_are_parts_and_warned_of(caplog):
    graph = ExpertGraph(experts("ab"), kinds(a=3, b=1))
    assert graph.usage == {"a": 0.75, "b": 0.25}
    assert "shares are 4 together" in caplog.text


@pytest.mark.parametrize(
    ("shares", "usage"),
    [
        ({"a": 0, "b": 0}, {"a": 0.5, "b": 0.5}),
        ({"a": None, "b": None}, {"a": 0.5, "b": 0.5}),
        ({"a": 0.5, "b": None, "c": None}, {"a": 0.5, "b": 0.25, "c": 0.25}),
        ({"a": 0, "b": None}, {"a": 0, "b": 1}),
    ],
)
def test_shares_that_are_missing_or_all_zero(shares, usage, caplog):
    assert ExpertGraph(experts(shares), kinds(**shares)).usage == usage
    assert not caplog.text


def test_experts_without_inputs():
    assert ExpertGraph(experts("ab"), []).usage == {"a": 0, "b": 0}


def test_usage_as_the_user_says():
    graph = functools.partial(ExpertGraph, experts("ab"), kinds(a=1, b=0))
    assert graph().by_usage == ["a", "b"]
    assert graph(usage={"b": 2}).by_usage == ["b", "a"]
    for usage in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="usage of expert 'a' must be at least 0"):
            graph(usage={"a": usage})
    with pytest.raises(RoutingError, match="no expert 'z'"):
        graph(usage={"z": 1})


def test_names_the_cycle():
    with pytest.raises(ConfigError, match=r"make a cycle: (a -> b -> c -> a|b -> c -> a -> b|c -> a -> b -> c);"):
        ExpertGraph(experts("abc"), kinds(a=1), [rule("a", "b"), rule("b", "c"), rule("c", "a")])
    with pytest.raises(ConfigError, match="cycle: a -> a"):
        ExpertGraph(experts("a"), kinds(a=1), [rule("a", "a")])


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf")])
def test_refuses_shares(share):
    with pytest.raises(ConfigError, match=r"inputs.a.share must be a finite number >= 0 or None"):
        ExpertGraph(experts("ab"), kinds(a=share, b=1))


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_refuses_probabilities(probability):
    with pytest.raises(ConfigError, match=r"must be a number in \[0, 1\]"):
        ExpertGraph(experts("ab"), kinds(a=1), [rule("a", "b", probability)])


def test_refuses_probabilities_of_more_than_1_together():
    with pytest.raises(ConfigError, match="more than 1 together"):
        ExpertGraph(experts("abc"), kinds(a=1), [rule("a", "b", 0.6), rule("a", "c", 0.6, "no")])


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        (([], []), ConfigError, "there are no experts"),
        ((experts("aa"), []), ConfigError, "two of expert 'a'"),
        ((experts("a"), [*kinds(a=1), *kinds(a=1)]), ConfigError, "two of input 'a'"),
        ((experts("ab"), kinds(a=1), [rule("a", "b"), rule("a", "b")]), ConfigError, "two of rule"),
        ((experts("a"), kinds(b=1)), RoutingError, "input 'b' leads to 'b'"),
        ((experts("a"), kinds(a=1), [rule("a", "b")]), RoutingError, "rule 'a' with verdict 'ok' leads to 'b'"),
        ((experts("a"), kinds(a=1), [rule("b", "a")]), RoutingError, "leads to 'b'"),
    ],
)
def test_refuses(arguments, error, problem):
    with pytest.raises(error, match=problem):
        ExpertGraph(*arguments)


def test_refuses_experts_without_bytes():
    with pytest.raises(ConfigError, match=r"bytes must be an integer >= 1, .*, got 0"):
        ExpertInfo(name="a", architecture="resnet", bytes=0)


def test_usage_that_is_known_goes_on_along_the_rules():
    rules = [rule("a", "b", 0.5), rule("b", "d", 0.5)]
    graph = ExpertGraph(experts("abd"), kinds(a=1), rules, usage={"b": 0.8})
    assert graph.usage == pytest.approx({"a": 1, "b": 0.8, "d": 0.4})


def test_rules_without_a_probability_share_what_is_left():
    rules = [rule("a", "b", None, "x"), rule("a", "c", None, "y"), rule("a", "d", 0.4, "z")]
    graph = ExpertGraph(experts("abcd"), kinds(a=1), rules)
    assert graph.usage == pytest.approx({"a": 1, "b": 0.3, "c": 0.3, "d": 0.4})
    with pytest.raises(ConfigError, match="of 'a''s verdicts are more than 1 together"):
        ExpertGraph(experts("ab"), kinds(a=1), [rule("a", "b", 1.0, "x"), rule("a", "b", 1.0, "y")])
