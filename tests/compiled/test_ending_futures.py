"""Futures end once, whatever their callers and callbacks do."""

from concurrent.futures import Future

import pytest

from jaxinfer.compiled import end_future


@pytest.mark.parametrize("running", [False, True])
def test_results_and_errors(running):
    for outcome in ("a result", ValueError("an error")):
        future = Future()
        if running:
            future.set_running_or_notify_cancel()
        end_future(future, outcome, "a request")
        assert (future.exception() or future.result()) is outcome


def test_a_cancelled_one_stays_cancelled():
    future = Future()
    future.cancel()
    end_future(future, "a result", "a request")
    assert future.cancelled()


def test_what_callbacks_raise_is_logged(caplog):
    def leave(future):
        raise SystemExit

    future = Future()
    future.add_done_callback(leave)
    end_future(future, "a result", "a request")
    assert future.result() == "a result"
    assert "A callback of a request has failed." in caplog.text
