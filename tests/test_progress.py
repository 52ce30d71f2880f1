"""Lines of long work: when they appear, where, and that they go."""

import os
import pathlib
import re
import sys
import threading
import time

import pytest

from jaxinfer import progress
from jaxinfer.progress import current_progress, long_work, showing
from tests.terminal import play

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.delenv("JAXINFER_PROGRESS")
    monkeypatch.setattr(progress, "LOG_DELAY", 0.05)


def shows(capfd, pattern):
    """Wait for what is written to match, which it must do as a whole."""
    written = []

    def matches():
        written.append(capfd.readouterr().err)
        return re.search(pattern, "".join(written))

    wait(matches)
    return "".join(written)


def wait(until, seconds=20):
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.02)
    assert until()


def test_a_callback_is_told_each_step():
    told = []
    with showing(lambda *args: told.append(args)), long_work("reading", total=3) as work:
        work.advance()
        work.update(what="writing", done=3)
    assert told == [("reading", 0, 3), ("reading", 1, 3), ("writing", 3, 3)]


def test_a_callback_gets_0_for_an_unknown_total():
    told = []
    with showing(lambda *args: told.append(args)), long_work("reading"):
        pass
    assert told == [("reading", 0, 0)]


def test_an_inner_none_leaves_what_was_current_progress():
    with showing(False), showing(None):
        assert current_progress() is False
        with showing(True):
            assert current_progress() is True
        assert current_progress() is False
    assert current_progress() is None


@pytest.mark.parametrize("bad", [0.5, "yes", [print]])
def test_refuses_anything_else(bad):
    with pytest.raises(ValueError, match="progress must be True, False, a function of"), showing(bad):
        pass


def test_short_work_writes_nothing(shown, capfd):
    with long_work("reading", total=3):
        pass
    time.sleep(0.3)
    assert capfd.readouterr() == ("", "")


def test_long_work_writes_one_line_off_a_terminal(shown, capfd):
    with long_work("reading", total=3) as work:
        work.advance()
        written = shows(capfd, "reading.*\n")
    assert re.fullmatch(r"jaxinfer: reading: 1 of 3, \d s\n", written)
    assert capfd.readouterr() == ("", "")


def test_a_log_gets_another_line_after_a_while(shown, monkeypatch, capfd):
    monkeypatch.setattr(progress, "INTERVAL", 0.2)
    with long_work("reading"):
        shows(capfd, r"(jaxinfer: reading, \d+ s\n){2}")


def test_the_newest_work_is_shown(shown, capfd):
    with long_work("outside"), long_work("inside"):
        written = shows(capfd, "side")
    assert "outside" not in written


def test_bytes_are_written_as_sizes(shown, capfd):
    with long_work("fetching", total=8_500_000_000, in_bytes=True) as work:
        work.update(done=1_200_000_000)
        shows(capfd, r"fetching: 1\.2 GB of 8\.5 GB, [\d.]+ [kMGT]B/s, \d+ s")


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_is_off(shown, monkeypatch, capfd, how):
    if how == "environment":
        monkeypatch.setenv("JAXINFER_PROGRESS", "0")
    with showing(False if how == "argument" else None), long_work("reading"):
        time.sleep(0.5)
    assert capfd.readouterr().err == ""


def test_the_argument_is_above_the_environment(shown, monkeypatch, capfd):
    monkeypatch.setenv("JAXINFER_PROGRESS", "0")
    with showing(True), long_work("reading"):
        shows(capfd, "reading")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_inside_takes_the_work_away(shown, error):
    with pytest.raises(error), long_work("reading"):
        raise error
    assert not progress._line._works


def test_its_thread_ends_with_the_last_work(shown):
    with long_work("reading"):
        time.sleep(0.1)
    wait(lambda: not any(thread.name == "jaxinfer-progress" for thread in threading.enumerate()))


def test_threads_advance_the_same_work():
    told = []
    with showing(lambda *args: told.append(args)), long_work("reading", total=400) as work:
        threads = [threading.Thread(target=lambda: [work.advance() for _ in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert work.done == 400
    assert len(told) == 401


SCRIPT = """
import os, sys, time
from jaxinfer import progress
from jaxinfer.progress import long_work
progress.DELAY = 0.1
def until_shown():
    while progress._line._bar is None:
        time.sleep(0.05)
    time.sleep(0.3)
print("before", flush=True)
with long_work("compiling programs of a rather long name that does not fit into the line", total=6) as work:
    work.advance(2)
    until_shown()
    with progress.paused():
        print("a note", flush=True)
    if "fork" in sys.argv:
        if (child := os.fork()) == 0:
            with long_work("in the child"):
                until_shown()
            os._exit(0)
        os.waitpid(child, 0)
    until_shown()
print("after", flush=True)
"""


def in_terminal(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "JAXINFER_PROGRESS"}
    played = play([sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT, environment=environment, timeout=60)
    assert played.status == 0, played.text
    return played


def test_a_terminal_shows_one_transient_line():
    played = in_terminal()
    assert re.search(r"2 of 6, \d+ s", played.written)
    assert played.lines == ["before", "a note", "after"]


def test_a_fork_shows_its_work_too():
    assert "in the child" in in_terminal("fork").written
