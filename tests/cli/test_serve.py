"""`jaxinfer serve`: it is ready, answers, and ends by a signal once its requests have ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app

pytest.importorskip("uvicorn")


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def ask(port, path, body=None, key="secret"):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_a_server_from_its_start_to_its_end(model_dir):
    port = free_port()
    command = [sys.executable, "-m", "jaxinfer", "serve", str(model_dir), "--port", str(port), "--name", "tiny"]
    command += ["--max-batch", "4", "--adapter", "no"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (failed.returncode, failed.stderr) == (2, "error: --adapter no: write NAME=DIR.\n")
    environment = os.environ | {"JAXINFER_API_KEY": "secret,other"}
    with subprocess.Popen(command[:-2], env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            give_up = time.monotonic() + 300
            while True:
                try:
                    ask(port, "/ready")
                    break
                except OSError:
                    assert server.poll() is None
                    assert time.monotonic() < give_up
                    time.sleep(0.1)
            body = {"prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            whole = json.loads(ask(port, "/v1/completions", body))
            events = ask(port, "/v1/completions", body | {"stream": True}).split("\n\n")
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(port, "/v1/models", key="wrong")
        finally:
            server.send_signal(signal.SIGTERM)
        errors = server.stderr.read()
    assert whole["usage"]["completion_tokens"] == 4
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts) == whole["choices"][0]["text"]
    refused.value.close()
    assert refused.value.code == 401
    assert f"Serving tiny at http://127.0.0.1:{port}/v1" in errors
    assert "Traceback" not in errors
    assert server.returncode in (0, -signal.SIGTERM)


def test_a_server_that_anybody_can_ask_is_warned_of(monkeypatch, model_dir):
    monkeypatch.setattr("uvicorn.run", lambda app, **options: None)
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)
    done = CliRunner().invoke(app, ["serve", str(model_dir), "--host", "0.0.0.0", "--max-batch", "4"])
    assert done.exit_code == 0, done.output
    assert "Anybody who can reach 0.0.0.0 may ask this server" in done.stderr
