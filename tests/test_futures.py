"""Calls that other threads make, and waits for their futures that are interrupted wherever they may be."""

import gc
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError

import pytest

from jaxinfer.checkpoints.readers import Readers
from jaxinfer.checkpoints.stores import Staging
from jaxinfer.futures import DaemonThreads, Event, InterruptibleFuture

PATIENCE = 60.0


class Interrupt(BaseException):
    """Ctrl-C, or whatever else is no `Exception`."""


@pytest.fixture
def threads():
    made = DaemonThreads(2, "test")
    yield made
    made.close()


def interrupt_at(place, function):
    """Call a function, interrupted in its thread at a place, by number from 1; return how many there were.

    They are as those of signals: as a function begins, and before one in C has returned, also in Python's own modules.
    """
    count, before = 0, sys.getprofile()

    def interrupt(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_return")
        if count == place:
            sys.setprofile(before)
            raise Interrupt

    sys.setprofile(interrupt)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def interrupted_everywhere(function, check):
    """Interrupt a function at each place in turn, and check after each; return how many there were."""
    place = 1
    while True:
        try:
            if interrupt_at(place, function) < place:
                return place
        except Interrupt:
            check()
        place += 1


def test_a_wait_interrupted_anywhere_leaves_the_threads_at_work():
    readers = Readers()

    def read():
        return readers.result(readers.submit(lambda: time.sleep(0.003) or 5), "what")

    def check():
        assert readers.submit(lambda: 7).result(PATIENCE) == 7

    assert interrupted_everywhere(read, check) > 20
    gate, began = threading.Event(), [threading.Event() for _ in range(4)]
    calls = [readers.submit(lambda mine=mine: (mine.set(), gate.wait(PATIENCE))) for mine in began]
    assert all(mine.wait(PATIENCE) for mine in began)  # no thread is lost
    gate.set()
    assert all(call.wait(PATIENCE) for call in calls)
    readers.close()


def test_a_buffer_taken_or_given_back_under_an_interrupt_leaves_no_lock_taken():
    staging = Staging()

    def use():
        staging.give_back(staging.take(4096))

    def check():
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()

    assert interrupted_everywhere(use, check) > 10
    staging.readers.close()


def test_an_event_set_under_an_interrupt_or_by_one_leaves_no_lock_taken():
    reached = []

    def use():
        event = Event()
        reached.append(event)
        event.wait(0.001)
        event.set()
        event.wait()

    def check():
        if reached:
            event = reached.pop()
            event.set()  # as a signal's handler may
            assert event.wait(PATIENCE)

    assert interrupted_everywhere(use, check) > 10
    assert not Event().wait(0.001)


def test_results_and_errors(threads):
    assert threads.submit(lambda a, b: a - b, 5, b=2).result() == 3
    failed = threads.submit(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result(PATIENCE)
    interrupted = threads.submit(lambda: sys.exit(3))
    with pytest.raises(SystemExit):
        interrupted.result(PATIENCE)
    assert isinstance(interrupted.error, SystemExit)
    assert threads.submit(lambda: None).result(PATIENCE) is None


def test_a_wait_that_is_too_long(threads):
    gate = threading.Event()
    call = threads.submit(gate.wait, PATIENCE)
    assert not call.wait(0.01)
    with pytest.raises(TimeoutError, match=r"not ended within 0.01 s"):
        call.result(0.01)
    gate.set()
    assert call.result(PATIENCE) is True


def test_many_wait_for_one(threads):
    gate, results = threading.Event(), []
    call = threads.submit(gate.wait, PATIENCE)
    waiting = [threading.Thread(target=lambda: results.append(call.result(PATIENCE))) for _ in range(5)]
    for thread in waiting:
        thread.start()
    gate.set()
    for thread in waiting:
        thread.join(PATIENCE)
    assert results == [True] * 5


def test_cancelled_before_it_begins(threads):
    made = []
    call = InterruptibleFuture(lambda: made.append(1))
    call.cancel()
    call.run()
    call.cancel()
    assert (made, call.done(), call.begun) == ([], True, None)
    with pytest.raises(CancelledError):
        call.result()
    ended = threads.submit(lambda: 5)
    assert ended.result(PATIENCE) == 5
    ended.cancel()
    assert ended.result() == 5


def test_closing_cancels_what_has_not_begun_and_ends_the_threads():
    before = set(threading.enumerate())
    threads, gate, began = DaemonThreads(1, "test"), threading.Event(), threading.Event()
    running = threads.submit(lambda: began.set() or gate.wait(PATIENCE))
    waiting = threads.submit(lambda: 5)
    assert began.wait(PATIENCE)
    threads.close()
    threads.close()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    gate.set()
    assert running.result(PATIENCE) is True
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_nothing_is_kept_once_it_has_ended(threads):
    class Buffer:
        """What a call reads to."""

    def made(fails):
        buffer = Buffer()
        call = threads.submit(lambda: (buffer, 1 // fails)[1] if fails is not None else buffer and 1)
        return weakref.ref(buffer), call

    gc.disable()
    try:
        kept, call = made(None)
        assert call.result(PATIENCE) == 1
        assert kept() is None
        kept, call = made(0)
        with pytest.raises(ZeroDivisionError):
            call.result(PATIENCE)
        gone = weakref.ref(call)
        del call
        until = time.monotonic() + PATIENCE
        while (gone() is not None or kept() is not None) and time.monotonic() < until:
            time.sleep(0.01)  # its thread lets it go a moment after it has ended
        assert gone() is None
        assert kept() is None
    finally:
        gc.enable()
