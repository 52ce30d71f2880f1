"""Replicas behind Ray Serve answer, stream, and are restarted; Ray is in an environment of its own (make ray)."""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.cli.test_serve import answers, free_port

ROOT = Path(__file__).parents[2]
RAY = ROOT / ".venv-ray"
SURE_TO_START = 300.0

pytestmark = pytest.mark.slow


def ask(port, **fields):
    body = {"model": "demo_model", "prompt": "def main():", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with urllib.request.urlopen(url, json.dumps(body | fields).encode(), timeout=120) as answer:
        return answer.read().decode()


def replicas(process):
    """The processes of replicas, by their ids."""
    found = set()
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found |= {child.pid} if "ServeReplica" in "".join(child.cmdline()) else set()
    return found


def until(process, holds):
    give_up = time.monotonic() + SURE_TO_START
    while not holds():
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.5)


@pytest.fixture
def server(tmp_path):
    """A server of two replicas: its process and its port."""
    if not (RAY / ".ray").exists():
        pytest.skip("make ray sets up Ray")
    port = free_port()
    command = [
        RAY / "bin/python",
        "examples/ray_serve.py",
        "examples/demo_model",
        "--replicas",
        "2",
        "--port",
        str(port),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    with (tmp_path / "log").open("w") as log:
        process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            until(process, lambda: answers(port, "/ready"))
            yield process, port
        finally:
            children = process.children(recursive=True)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            for left in [process, *children]:
                with contextlib.suppress(psutil.Error):
                    left.kill()


def test_replicas_answer_and_are_restarted(server):
    process, port = server
    first = replicas(process)
    assert len(first) == 2
    whole = json.loads(ask(port))["choices"][0]["text"]
    events = ask(port, stream=True).split("\n\n")
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert events[-2] == "data: [DONE]"
    assert "".join(texts) == whole != ""

    killed = min(first)
    os.kill(killed, signal.SIGKILL)
    until(process, lambda: len(replicas(process) - {killed}) == 2)
    assert {json.loads(ask(port))["choices"][0]["text"] for _ in range(4)} == {whole}
