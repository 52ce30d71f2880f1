"""Processes that fetch from a hub: several at once, and one that is interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(hub, tmp_path):
    """A function that starts a command, after a piece of Python."""
    started = []

    def start(*arguments: str, before: str = "") -> subprocess.Popen:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", f"{before}\nfrom jaxinfer.cli import app; app()", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


@pytest.mark.slow
def test_two_processes_fetch_and_convert_once(hub, start):
    hub.slow = 0.05
    processes = [start("convert", "org/tiny") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert hub.fetched.count("model.safetensors") == 1


def test_an_interrupt_while_fetching_ends_it_at_once_and_leaves_nothing(hub, start, tmp_path):
    hub.slow = 5
    process = start("convert", "org/tiny", "out")
    _wait_for(lambda: "model.safetensors" in hub.fetched)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 10  # 2, where the machine is not busy; the file takes a minute
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "absl" not in said
    assert len(said.strip().splitlines()) <= 1
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


@pytest.mark.slow
def test_an_interrupt_while_converting_waits_for_what_is_being_written(start, tiny, tmp_path):
    slowly = "from jaxinfer.checkpoints import writing; writing.GROUP_BYTES = 1"  # a save for each weight
    process = start("convert", str(tiny), "out", before=slowly)
    _wait_for(lambda: next((tmp_path / ".out.partial").rglob("ocdbt*"), None))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "absl" not in said
    assert not list(tmp_path.glob("*out*"))
    assert not list(tmp_path.glob(".*out*"))


@pytest.mark.slow  # the library tries for half a minute
def test_a_hub_that_goes_away_meanwhile_is_one_line(hub, start, tmp_path):
    hub.after["config.json"] = lambda: setattr(hub, "down", True)
    process = start("convert", "org/tiny", "out")
    _, said = process.communicate(timeout=120)
    assert (process.returncode, len(said.splitlines())) == (2, 1), said
    assert "org/tiny: model.safetensors: " in said
    hub.down = False
    hub.after.clear()
    process = start("convert", "org/tiny", "out")
    assert process.wait(timeout=60) == 0
    assert hub.fetched.count("config.json") == 1
