"""Who is refused when too many requests wait, who gives way to whom, and what is learned from those that have run."""

import pytest

from jaxinfer import SamplingParams
from jaxinfer.generation.engine.queue_time import Queue
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.engine.stats import SchedulerStats
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.serving import OverloadedError
from jaxinfer.serving.loop import Decider, Loop
from jaxinfer.serving.ticket import Reader

FULL, IDLE = SchedulerStats(running=4, waiting=1), SchedulerStats(running=0, waiting=0)


def ticket(key, priority=0, *, arrived=0.0, n=1, adapter=None, **options):
    params = SamplingParams(priority=priority, n=n, adapter=adapter)
    request = Request(request_id=key, prompt=None, prompt_token_ids=(1,), params=params, max_length=9)
    made = RequestTicket(request.sequences(), owner=None, **options)
    made.arrived = arrived
    return made


def learned(seconds=2.0, *, slots=4, max_seconds=4.0):
    """A queue that has seen requests of so many seconds: one of 4 slots is free every 0.5 s, and 2 s may be waited."""
    queue = Queue(slots, max_seconds)
    first = ticket("first")
    queue.add(first, IDLE)
    assert queue.update([first], 10.0) == []
    queue.ended(first, 10.0 + seconds, IDLE)
    return queue


def fill(queue, count, **options):
    made = [ticket(f"{count} {i}", **options) for i in range(count)]
    for each in made:
        queue.check(each.priority, [], FULL)
        assert queue.add(each, FULL) is None
    return made


def test_as_many_may_wait_as_begin_in_half_the_time():
    queue = learned()
    fill(queue, 4)
    with pytest.raises(OverloadedError, match=r"about 2\.2 s, and max_queue_time is 4 s") as error:
        queue.check(0, [], FULL)
    assert error.value.retry_after == pytest.approx(0.5)
    queue.check(0, [], SchedulerStats(running=3, waiting=0))  # a slot is free


def test_requests_in_line_count():
    queue, line = learned(), [ticket(str(i)) for i in range(4)]
    queue.check(0, line[1:], FULL)
    with pytest.raises(OverloadedError):
        queue.check(0, line, FULL)
    with pytest.raises(OverloadedError):
        queue.check(0, [ticket("many", n=4)], FULL)


@pytest.mark.parametrize("queue", [Queue(4, 4.0), Queue(4, None), learned(max_seconds=None)])
def test_without_a_limit_or_an_estimate_nobody_is_refused(queue):
    fill(queue, 100)
    assert queue.update([], 3.0) == []


def test_a_higher_priority_takes_the_place_of_the_last_of_the_lowest():
    queue = learned()
    fill(queue, 2)
    low, last = ticket("low", 5, arrived=1.0), ticket("last", 5, arrived=2.0)
    for each in (low, last):
        assert queue.add(each, FULL) is None
    high = ticket("high", -1, arrived=3.0)
    queue.check(-1, [], FULL)
    assert queue.add(high, FULL) is last
    assert isinstance(last.error, OverloadedError)
    assert "gave way to a request of higher priority" in str(last.error)
    with pytest.raises(OverloadedError):
        queue.check(5, [], FULL)
    assert queue.add(ticket("equal", 5, arrived=4.0), FULL) is None  # had it been checked before: it replaces no equal
    assert low.error is None


def test_who_waits_for_the_whole_time_gives_way():
    queue = learned()
    queue.add(early := ticket("early", arrived=1.0), FULL)
    queue.add(kept := ticket("kept", arrived=1.5, limited=False), FULL)
    queue.add(ticket("late", arrived=2.0), FULL)
    assert queue.update([], 5.5) == [early]
    assert "has waited for 4.5 s" in str(early.error)
    assert kept.error is None
    assert [each.key for each in queue] == ["kept", "late"]


def test_a_request_that_has_begun_may_take_any_time():
    queue = learned()
    (one, other) = fill(queue, 2)
    assert queue.update([one], 100.0) == [other]
    assert one.error is None


def test_the_estimate_follows_the_load():
    queue = learned()
    slow = fill(queue, 1)[0]
    queue.update([slow], 20.0)
    for _ in range(60):
        queue.ended(slow, 40.0, SchedulerStats(running=3, waiting=1))  # 20 s on one of 4
    with pytest.raises(OverloadedError, match=r"about 2\.5 s"):
        queue.check(0, [], FULL)


def test_pages_may_be_fewer_than_slots():
    queue = learned(slots=100)
    slow = fill(queue, 1)[0]
    queue.update([slow], 20.0)
    for _ in range(60):
        queue.ended(slow, 40.0, SchedulerStats(running=1, waiting=3))
    with pytest.raises(OverloadedError, match=r"about 5\.0 s"):
        queue.check(0, [], SchedulerStats(running=2, waiting=1))


class Taken(Decider):
    """Takes requests and does nothing with them."""

    def submit(self, ticket, now): ...

    def poll(self, now):
        return ()

    def done(self, done): ...

    def cancel(self, ticket):
        return True

    def drain(self, error):
        return ()


def test_requests_and_their_adapters_are_counted_wherever_they_are(llm):
    queue, loop = Queue(4, None), Loop(Taken(), what="It", name="taken", max_tickets=3)
    runs, waits, more, in_line = (
        ticket(str(i), n=2, adapter=adapter, reader=Reader()) for i, adapter in enumerate(["a", "a", None, "b"])
    )
    for each in (runs, waits, more):
        loop.submit(each)
        loop._accept_line()
        queue.add(each, IDLE)
    queue.update([runs], 1.0)
    loop.submit(in_line, block=True)
    stats = queue.with_waiting(llm.stats(), loop)
    assert stats.waiting == 6
    assert (stats.running_adapters, stats.waiting_adapters) == ({"a": 1}, {"a": 1, "b": 1})
