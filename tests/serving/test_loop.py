"""Loops: every request ends once, whatever its decider, its callers and its work do, and no thread is left."""

import asyncio
import contextlib
import dis
import gc
import itertools
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.serving import ClosedError, DeadlineExceededError, DiedError, FailedError, OverloadedError
from jaxinfer.serving import loop as loop_module
from jaxinfer.serving.future import TicketFuture
from jaxinfer.serving.loop import Decider, Loop, Work
from jaxinfer.serving.ticket import Reader, Ticket

PATIENCE = 20


class Item(Ticket):
    """What `run` does with it: gives its number, or raises it."""

    def __init__(self, number, run=lambda number: number, **options):
        super().__init__(number, **options)
        self.run = run


class InTurn(Decider):
    """One at a time in each lane, in their order."""

    def __init__(self, lanes=1, **options):
        self.waiting, self.free = [], list(range(lanes))
        names = [f"lane{number}" for number in range(lanes)]
        self.loop = Loop(self, what="This queue", name="test", lanes=names, **options)
        self.loop.start()

    next_time = None

    def check(self, ticket, now):
        if ticket.run is None:
            raise ValueError("nothing to run")

    def submit(self, ticket, now):
        self.waiting.append(ticket)

    def poll(self, now):
        works = []
        while self.waiting and self.free:
            ticket = self.waiting.pop(0)
            works.append(Work(lambda ticket=ticket: ticket.run(ticket.key), self.free.pop(0), ticket))
        return works

    def done(self, done):
        self.free.append(done.work.lane)
        failed = done.error is not None
        self.loop.end(done.work.what, FailedError(repr(done.error)) if failed else done.result)

    def cancel(self, ticket):
        if ticket not in self.waiting:
            return False
        self.waiting.remove(ticket)
        return True

    def drain(self, error):
        while self.waiting:
            self.loop.end(self.waiting.pop(), error)
        return ()


@pytest.fixture
def start():
    made = []

    def start(*args, **options):
        made.append(InTurn(*args, **options).loop)
        return made[-1]

    yield start
    for loop in made:
        loop.close(drain=False, timeout=PATIENCE)
        assert loop.num_tickets == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxinfer-lane")]


def ask(loop, item, **options):
    loop.submit(item, **options)
    return item.future


class Held:
    """Work that waits until it may go on."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, number):
        self.begun.set()
        assert self.go.wait(PATIENCE)
        return number


def test_a_time_that_no_lock_can_be_waited_for(start, monkeypatch):
    monkeypatch.setattr(InTurn, "next_time", 1e30)
    loop = start()
    assert [ask(loop, Item(number)).result(PATIENCE) for number in range(3)] == [0, 1, 2]


def test_a_future_that_its_caller_ends_harms_no_other(start):
    """While it waits, and while it runs."""
    loop, held = start(), Held()
    running, waiting, last = (ask(loop, Item(number, run)) for number, run in enumerate([held, held, str]))
    assert held.begun.wait(PATIENCE)
    running.set_result("of its caller")
    waiting.set_exception(KeyError("of its caller"))
    held.go.set()
    assert last.result(PATIENCE) == "2"
    assert running.result() == "of its caller"
    assert isinstance(waiting.exception(), KeyError)


def test_a_future_that_was_cancelled_ends_in_silence(caplog):
    future = TicketFuture("key")
    future.cancel()
    assert not future.begin()
    future.end("outcome")
    assert future.cancelled()
    assert not caplog.records


def raises(error):
    def run(number):
        raise error

    return run


ACTIONS = st.lists(st.sampled_from(["work", "fail", "interrupt", "refuse", "cancel", "wait"]), min_size=1, max_size=40)


@settings(max_examples=40)
@given(actions=ACTIONS, lanes=st.integers(1, 3), limit=st.none() | st.integers(1, 5), drain=st.booleans())
def test_every_request_ends_once(actions, lanes, limit, drain):
    loop, futures, ends = InTurn(lanes, max_tickets=limit).loop, [], []
    runs = {"work": lambda number: number, "fail": raises(KeyError("x")), "interrupt": raises(SystemExit())}
    for number, action in enumerate(actions):
        if action == "cancel" and futures:
            futures[number % len(futures)].cancel()
        elif action == "wait":
            time.sleep(1e-4)
        elif action == "refuse":
            with pytest.raises((ValueError, OverloadedError)):
                loop.submit(Item(number, run=None))
        elif action in runs:
            try:
                futures.append(ask(loop, Item(number, run=runs[action])))
            except OverloadedError as error:
                assert limit is not None
                assert error.retry_after is None or error.retry_after >= 0  # noqa: PT017
            else:
                futures[-1].add_done_callback(ends.append)
    loop.close(drain=drain)
    assert not wait(futures, 0).not_done
    assert len(ends) == len(set(ends)) == len(futures)
    for future in futures:
        error = None if future.cancelled() else future.exception()
        assert error is None or isinstance(error, FailedError | ClosedError)
        assert not (drain and isinstance(error, ClosedError))
    counted = loop.statistics
    assert counted.answered + counted.failed + counted.cancelled == len(futures)
    assert loop.num_tickets == 0
    with pytest.raises(ClosedError, match="This queue is closed"):
        loop.submit(Item(-1))


def test_callers_stand_in_line(start):
    loop, held = start(max_tickets=1), Held()
    first = ask(loop, Item(0, held))
    with pytest.raises(OverloadedError, match="1 requests are in flight already"):
        loop.submit(Item(1))
    found = []
    threads = [
        threading.Thread(target=lambda number=number: found.append(ask(loop, Item(number), block=True)))
        for number in (1, 2)
    ]
    for count, thread in enumerate(threads, 2):
        thread.start()
        give_up = time.monotonic() + PATIENCE
        while loop.num_tickets < count:
            assert time.monotonic() < give_up
            time.sleep(1e-3)
    with pytest.raises(ValueError, match="is in flight already"):
        loop.submit(Item(2), block=True)
    held.go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert first.result(PATIENCE) == 0
    assert sorted(future.result(PATIENCE) for future in found) == [1, 2]


def test_a_line_has_an_end(start):
    loop, held = start(max_tickets=1, max_line=1), Held()
    first = ask(loop, Item(0, held))
    assert held.begun.wait(PATIENCE)
    second = Item(1, reader=Reader())
    second.reader.loop = asyncio.new_event_loop()
    loop.submit(second, block=True)
    with pytest.raises(OverloadedError, match=r"2 requests are in flight already, and the limit \(1, and 1 in line\)"):
        loop.submit(Item(2), block=True)
    held.go.set()
    assert first.result(PATIENCE) == 0
    second.reader.loop.close()


def test_what_is_about_to_be_accepted_takes_no_place_in_line(start):
    loop = start(max_tickets=2, max_line=1)
    with loop.lock:  # nothing is accepted meanwhile
        futures = [ask(loop, Item(number)) for number in (0, 1)]
        third = Item(2, reader=Reader())
        third.reader.loop = asyncio.new_event_loop()
        loop.submit(third, block=True)
        with pytest.raises(OverloadedError, match="3 requests are in flight already"):
            loop.submit(Item(3), block=True)
    assert [future.result(PATIENCE) for future in futures] == [0, 1]
    third.reader.loop.close()


def test_a_deadline_that_passes_in_line_ends_the_request(start):
    """Its caller waits no longer, though nothing else happens."""
    loop, held = start(max_tickets=1), Held()
    first = ask(loop, Item(0, held))
    assert held.begun.wait(PATIENCE)
    late, later = (Item(number, deadline=loop.clock() + seconds) for number, seconds in ((1, 0.05), (2, 3600)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, loop, later, block=True)
        future = ask(loop, late, block=True)
        with pytest.raises(DeadlineExceededError, match="The deadline passed before the request began"):
            future.result(PATIENCE)
        held.go.set()
        assert first.result(PATIENCE) == 0
        assert waiting.result(PATIENCE).result(PATIENCE) == 2
    assert (loop.statistics.answered, loop.statistics.shed) == (2, 1)


def test_a_callback_cannot_wait_for_itself(start):
    loop, held, second, refused = start(max_tickets=1), Held(), Held(), Future()

    def again(_):
        try:
            loop.submit(Item(2, second), block=True)
            loop.submit(Item(3), block=True)
        except OverloadedError as error:
            refused.set_result(error)

    ask(loop, Item(0, held)).add_done_callback(again)
    held.go.set()
    assert isinstance(refused.result(PATIENCE), OverloadedError)
    second.go.set()


def test_a_callback_that_waits_holds_up_no_answer(start):
    """For another request of the same loop, or for ever."""
    loop, release, found = start(2), threading.Event(), Future()

    def follow(future):
        found.set_result(ask(loop, Item("second", len)).result(PATIENCE))

    ask(loop, Item("first", str)).add_done_callback(follow)
    assert found.result(PATIENCE) == 6
    blocked = ask(loop, Item("blocked", str))
    blocked.add_done_callback(lambda _: release.wait(PATIENCE))
    assert [ask(loop, Item(number)).result(PATIENCE) for number in range(3)] == [0, 1, 2]

    async def main():
        return await ask(loop, Item("awaited", str))

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == "awaited"
    cancelled = ask(loop, Item("cancelled", Held()))
    assert cancelled.cancel()
    release.set()


def test_what_callbacks_raise_is_logged(start, caplog):
    loop, held, called = start(), Held(), threading.Event()
    future = ask(loop, Item("mine", held))
    future.add_done_callback(raises(SystemExit()))
    future.add_done_callback(lambda _: called.set())
    held.go.set()
    assert called.wait(PATIENCE)
    assert future.result(0) == "mine"
    assert "A callback of request mine has failed." in caplog.text


def test_a_callback_that_hangs_does_not_hang_the_end(start, monkeypatch, caplog):
    monkeypatch.setattr(loop_module, "CALLBACK_SECONDS", 0.05)
    loop, release = start(), threading.Event()
    future = ask(loop, Item(0))
    future.add_done_callback(lambda _: release.wait(PATIENCE))
    loop.close()
    assert future.result(0) == 0
    assert "This queue is closed, though a callback of a future has not ended." in caplog.text
    release.set()


INTERRUPTIBLE = ("CALL", "RESUME", "JUMP_BACKWARD", "SEND", "FOR_ITER")
"""Instructions after which Python looks for signals, and some that may end there."""


class InterruptedAt:
    """Raises KeyboardInterrupt in this thread where the `count`th look for signals may find one."""

    def __init__(self, count):
        self.left, self._before = count, {}

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename == __file__:
            return self._trace
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            before = self._before.get(id(frame))
            self._before[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before is not None and before.startswith(INTERRUPTIBLE):
                self.left -= 1
                if self.left == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        elif event == "return":
            self._before.pop(id(frame), None)
        return self._trace


@pytest.mark.parametrize("action", ["submit", "cancel", "result", "callback"])
def test_an_interrupted_caller_harms_no_other(start, action):
    """Wherever it is interrupted, all others get their answers, and the loop its room back."""
    loop, number, interrupted = start(max_tickets=4), 0, True
    actions = {
        "submit": lambda future: ask(loop, Item((number, "new"))),
        "cancel": lambda future: future.cancel(),
        "result": lambda future: future.result(PATIENCE),
        "callback": lambda future: future.add_done_callback(str),
    }
    with InterruptedAt(sys.maxsize):  # what runs under it for the first time is not traced in full
        actions[action](ask(loop, Item("first")))
    while interrupted:
        number += 1
        mine, other = ask(loop, Item((number, "mine"))), ask(loop, Item((number, "other")))
        interrupted = False
        try:
            with InterruptedAt(number):
                actions[action](mine)
        except KeyboardInterrupt:
            interrupted = True
        assert other.result(PATIENCE) == (number, "other")
        give_up = time.monotonic() + PATIENCE
        while loop.num_tickets:
            assert time.monotonic() < give_up, number
            loop.wake()
            time.sleep(1e-4)
        assert mine.done()
        assert ask(loop, Item((number, "next"))).result(PATIENCE) == (number, "next")
    assert number > 3


def test_a_caller_that_loses_locks_harms_no_other(start):
    """As one does that is interrupted where `concurrent.futures.wait` takes them."""
    loop, held, begin = start(), Held(), time.monotonic()
    first, *lost = (ask(loop, Item(number, held if number == 0 else str)) for number in range(200))
    for future in lost:
        future._condition.acquire()
    held.go.set()
    assert ask(loop, Item("other")).result(PATIENCE) == "other"
    assert first.result(PATIENCE) == 0
    assert [future.result(PATIENCE) for future in lost] == [str(number) for number in range(1, 200)]
    assert time.monotonic() - begin < PATIENCE / 2
    for future in lost:
        future._condition.release()


def test_signals_harm_nobody(start):
    """Real ones, which come anywhere while requests are submitted, cancelled and waited for."""
    loop, begin = start(2), time.monotonic()
    for number in range(30):
        futures = []
        timer = threading.Timer(1e-4 * (number % 20), signal.raise_signal, [signal.SIGINT])
        with contextlib.suppress(KeyboardInterrupt):
            timer.start()
            for item in itertools.count():
                futures.append(ask(loop, Item((number, item))))
                futures[item // 2].cancel()
                futures[item // 3].add_done_callback(str)
        for future in futures:
            assert future.cancelled() or future.result(PATIENCE)[0] == number
    assert ask(loop, Item("last")).result(PATIENCE) == "last"
    assert time.monotonic() - begin < PATIENCE


def test_a_reader_is_told(start):
    loop = start()

    async def main():
        reader = Reader()
        reader.attach()
        items = [Item(number, reader=reader) for number in range(3)]
        for item in items:
            loop.submit(item)
        return [await item.wait() for item in items]

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == [0, 1, 2]


@pytest.mark.parametrize("where", ["poll", "done"])
def test_a_mistake_of_the_decider_ends_all(start, where, monkeypatch):
    def mistake(self, _):
        raise SystemExit(where)

    held, loop = Held(), start()
    futures = [ask(loop, Item(0, held)), ask(loop, Item(1))]
    assert held.begun.wait(PATIENCE)
    monkeypatch.setattr(InTurn, where, mistake)
    held.go.set()
    for future in futures[where == "poll" :]:
        with pytest.raises(DiedError, match=f"This queue has died of SystemExit: {where}"):
            future.result(PATIENCE)
    with pytest.raises(DiedError):
        loop.submit(Item(2))


def test_work_that_hangs_does_not_hang_the_end(start, monkeypatch):
    held, loop = Held(), start()
    future = ask(loop, Item(0, held))
    assert held.begun.wait(PATIENCE)
    loop.close(drain=False, timeout=0.05)
    with pytest.raises(ClosedError):
        future.result(0)
    held.go.set()
    held, loop = Held(), start()
    future = ask(loop, Item(0, held))
    assert held.begun.wait(PATIENCE)
    monkeypatch.setattr(loop_module, "HANGING_SECONDS", 0.05)
    with pytest.raises(DiedError, match=r"its work has not ended for 0\.05 s"):
        loop.close()
    with pytest.raises(DiedError):
        future.result(0)
    held.go.set()


def test_what_is_decided_for_is_let_go(start):
    class Owner:
        pass

    loop, owner = start(), Owner()
    item = Item(0, owner=owner)
    owner_gone, item_gone = weakref.ref(owner), weakref.ref(item)
    future = ask(loop, item)
    assert future.result(PATIENCE) == 0
    del owner, item
    gc.collect()
    assert owner_gone() is None
    give_up = time.monotonic() + PATIENCE
    while item_gone() is not None:
        assert time.monotonic() < give_up, "the future, which the caller keeps, keeps more"
        gc.collect()
    cancelled = ask(loop, Item(1))
    cancelled.cancel()
    wait([cancelled], PATIENCE)
    with pytest.raises(CancelledError):
        cancelled.result(0)


def test_a_drain_ends_with_a_ticket_that_ends_while_polling():
    """As a deadline does that passes before anything has begun: nothing else happens then."""

    class Expiring(InTurn):
        @property
        def next_time(self):
            return self.loop.clock() + 0.05 if self.waiting else None

        def poll(self, now):
            if self.loop.num_tickets and not self.loop.is_running:
                self.loop.end(self.waiting.pop(), DeadlineExceededError("late"))
            return ()

    decider = Expiring()
    future = decider.loop.serve(Item(0))
    closing = threading.Thread(target=decider.loop.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert isinstance(future.exception(PATIENCE), DeadlineExceededError)
