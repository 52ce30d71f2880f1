"""Which experts leave: the paper's example, and two stages by brute force."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.experts.scheduling.eviction import first_in, queue_aware, two_stage
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo, InputKind, Rule
from jaxinfer.experts.scheduling.pool import ModelPool
from tests.experts.systems import gpu, scheduler


def graph_of(experts, rules):
    """A graph of experts (name, usage, bytes) and rules (expert, next)."""
    infos = [ExpertInfo(name=name, architecture="resnet", bytes=size) for name, _, size in experts]
    inputs = [InputKind(name=name, expert=name) for name, _, _ in experts]
    follow = [Rule(expert=a, verdict=b, next=b, probability=0.1) for a, b in rules]
    return ExpertGraph(infos, inputs, follow, usage={name: usage for name, usage, _ in experts})


EXAMPLE = graph_of(
    [("A", 0.30, 1), ("B", 0.05, 1), ("C", 0.20, 2), ("D", 0.10, 2), ("Z", 0.35, 1)], [("Z", "C"), ("A", "D")]
)


def test_example():
    """C's predecessor Z is not in the pool; then the least used: B, and D, whose predecessor A is there."""
    for need, victims in ((1, ["C"]), (3, ["C", "B"]), (4, ["C", "B", "D"])):
        pool = ModelPool(0, 6, lambda free, pool: two_stage(free, pool.resident, EXAMPLE, EXAMPLE.usage))
        for name in "ABCD":
            pool.begin_load(name, EXAMPLE.experts[name].bytes)
            pool.end_load(name, loaded=True)
        assert pool.begin_load("new", need) == victims


def test_ties():
    graph = graph_of(
        [("a", 0.1, 1), ("b", 0.1, 2), ("c", 0.1, 2), ("x", 0.3, 3), ("y", 0.2, 3), ("w", 0.2, 3), ("p", 1, 1)],
        [("p", "x"), ("p", "y"), ("p", "w")],
    )
    # First stage: larger, less used, name. Second: less used, larger, name.
    assert two_stage("abcxyw", set("abcxyw"), graph, graph.usage) == ["w", "y", "x", "b", "c", "a"]
    assert two_stage("abcxyw", set("abcxywp"), graph, graph.usage) == ["b", "c", "a", "w", "y", "x"]


@st.composite
def pools(draw):
    names = "abcdef"[: draw(st.integers(1, 6))]
    experts = [(name, draw(st.integers(0, 3)) / 10, draw(st.integers(1, 3))) for name in names]
    pairs = [pair for pair in itertools.combinations(names, 2) if draw(st.booleans())]
    resident = {name for name in names if draw(st.booleans())}
    free = [name for name in sorted(resident) if draw(st.booleans())]
    return graph_of(experts, pairs), free, resident


@given(pools())
def test_two_stages_by_brute_force(drawn):
    """Of all orders of the free experts there is one with no two neighbours the wrong way round: that one."""
    graph, free, resident = drawn

    def first_stage(name):
        return bool(graph.predecessors[name]) and not graph.predecessors[name] & resident

    def before(x, y):
        if first_stage(x) != first_stage(y):
            return first_stage(x)
        size = graph.experts[y].bytes - graph.experts[x].bytes
        used = graph.usage[x] - graph.usage[y]
        return ((size, used, x) < (0, 0, y)) if first_stage(x) else ((used, size, x) < (0, 0, y))

    right = [order for order in itertools.permutations(free) if all(before(x, y) for x, y in itertools.pairwise(order))]
    assert [tuple(two_stage(free, resident, graph, graph.usage))] == right


def test_experts_that_wait_in_a_queue_leave_last():
    assert queue_aware(["a", "b", "c", "d"], {"a": 0, "c": 1}) == ["b", "d", "c", "a"]
    assert queue_aware(["a", "b"], {}) == ["a", "b"]


def test_first_in_first_out():
    assert first_in("abc", {"a": 3, "b": 1, "c": 2}.get) == ["b", "c", "a"]


@pytest.mark.parametrize(("policy", "first"), [("best", "b"), ("paper", "d")])
def test_what_follows_an_expert_that_is_loaded_stays(policy, first):
    """d follows a, and b is used least; in the paper's policy only experts that are loaded lead to others."""
    system = scheduler("adcb", gpu(2), policy=policy, rules=["ad"], placed=False)
    manager, (executor,) = system.manager, system.executors
    for name in "db":
        manager.end_load(manager.begin_load(executor, name), loaded=True)
    assert [left.expert for left in manager.begin_load(executor, "a").evictions] == [first]


@pytest.mark.parametrize(("policy", "first"), [("best", "b"), ("paper", "d")])
def test_what_follows_an_expert_that_is_being_loaded_stays(policy, first):
    system = scheduler("adcb", gpu(3), policy=policy, rules=["ad"], placed=False)
    manager, (executor,) = system.manager, system.executors
    for name in "db":
        manager.end_load(manager.begin_load(executor, name), loaded=True)
    assert not manager.begin_load(executor, "a").evictions
    assert [left.expert for left in manager.begin_load(executor, "c").evictions] == [first]
