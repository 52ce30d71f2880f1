"""What runs next: groups, in the order of their first requests, and how far one may grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.experts.scheduling.queue import ExecutorQueue
from jaxinfer.experts.scheduling.request import Request


def queue_of(experts, *, arrivals=None, **options):
    """A queue with requests for these experts, which arrive a second after each other."""
    queue = ExecutorQueue(**{"arranged": True, **options})
    arrivals = arrivals or range(len(experts))
    for number, (expert, arrival) in enumerate(zip(experts, arrivals, strict=True)):
        queue.add(Request(id=number, expert=expert, arrival=arrival, latency=1.0))
    return queue


def text(queue):
    return "".join(request.expert for request in queue)


def test_requests_go_behind_those_with_their_expert():
    queue = queue_of("abacbaa")
    assert text(queue) == "aaaabbc"
    assert [request.id for request in queue] == [0, 2, 5, 6, 1, 4, 3]
    assert queue.experts() == ["a", "b", "c"]
    assert [queue.count(expert) for expert in "abcd"] == [4, 2, 1, 0]
    assert queue.latency == len(queue) == 7


def test_without_arranging_only_neighbours_are_a_group():
    queue = queue_of("aabaa", arranged=False)
    assert text(queue) == "aabaa"
    assert [len(queue.take(queue.first(), 1)) for _ in range(2)] == [1, 1]
    assert queue.first().expert == "b"


def test_taking_part_of_a_group():
    queue = queue_of("abaa")
    assert [request.id for request in queue.take(queue.first(), 2)] == [0, 2]
    assert text(queue) == "ab"
    queue.add(Request(id=9, expert="a", arrival=9))
    assert text(queue) == "aab"
    queue.take(queue.first(), 2)
    queue.add(Request(id=10, expert="a", arrival=10))  # the group has gone: a new one, behind the others
    assert text(queue) == "ba"


def test_empty():
    queue = queue_of("a")
    queue.take(queue.first(), 1)
    assert (queue.first(), len(queue), queue.latency, queue.experts(), text(queue)) == (None, 0, 0.0, [], "")


def test_removing():
    queue = queue_of("abab")
    first, *_ = queue
    assert queue.remove(first)
    assert not queue.remove(first)
    assert text(queue) == "abb"
    assert [request.id for request in queue.remove_expert("b")] == [1, 3]
    assert queue.remove_expert("z") == []
    assert text(queue) == "a"
    assert queue.latency == 1


def test_removing_an_expert_with_two_groups():
    queue = queue_of("abab", max_age=1.5)
    assert text(queue) == "aabb"
    queue = queue_of("aba", arrivals=[0, 1, 5], max_age=1.5)
    assert text(queue) == "aba"
    assert queue.experts() == ["a", "b"]
    assert [request.id for request in queue.remove_expert("a")] == [0, 2]
    assert text(queue) == "b"


@pytest.mark.parametrize(("max_age", "second"), [(None, None), (5, 7)])
def test_a_stream_without_end_does_not_starve_the_others(max_age, second):
    """A request for "a" comes every second, before one is served. From second 7 on they go behind "b", of second 1."""
    queue = queue_of("ab", max_age=max_age)
    for now in range(2, 100):
        queue.add(Request(id=now, expert="a", arrival=now))
        assert (text(queue)[-1] == "a") == (second is not None and now >= second)
        if queue.take(queue.first(), 1)[0].expert == "b":
            assert now == second + 1
            return
    assert second is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(0, 2))), st.integers(1, 6))
def test_none_overtakes_one_that_has_waited_longer(steps, max_age):
    """Requests come (with pauses) and are taken; each may only stand before those that came at most max_age before."""
    queue, now = ExecutorQueue(arranged=True, max_age=max_age), 0
    for number, (expert, pause, taken) in enumerate(steps):
        now += pause
        queue.add(Request(id=number, expert=expert, arrival=now))
        order = list(queue)
        for place, request in enumerate(order):
            assert all(request.arrival - other.arrival <= max_age for other in order[place + 1 :])
        for _ in range(taken):
            if group := queue.first():
                queue.take(group, 1)


@given(st.lists(st.sampled_from("abcd")), st.booleans())
def test_requests_for_an_expert_stay_in_order(experts, arranged):
    queue = queue_of(experts, arranged=arranged)
    for expert in "abcd":
        assert [r.id for r in queue if r.expert == expert] == [n for n, e in enumerate(experts) if e == expert]
    if arranged:
        assert text(queue) == "".join(expert * experts.count(expert) for expert in dict.fromkeys(experts))
    else:
        assert text(queue) == "".join(experts)


def test_taking_very_many_out_from_the_back_looks_at_each_once():
    compared = []

    class Compared(Request):
        def __eq__(self, other):
            compared.append(other)
            return self is other

        __hash__ = object.__hash__

    queue = ExecutorQueue(arranged=True)
    requests = [Compared(id=number, expert="a", arrival=0) for number in range(500)]
    for each in requests:
        queue.add(each)
    assert all(queue.remove(each) for each in reversed(requests))
    assert not queue.remove(requests[0])
    assert len(compared) <= 500
    assert len(queue) == 0
