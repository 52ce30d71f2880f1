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
            until(server, lambda: answers(port, "/ready"))
            body = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
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
    assert server.returncode == 0


def begin(*arguments, **environment):
    """Start a server; wait until it listens."""
    port = free_port()
    command = [sys.executable, "-m", "jaxinfer", "serve", *map(str, arguments), "--port", str(port)]
    environment = {key: value for key, value in os.environ.items() if key != "JAXINFER_API_KEY"} | environment
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    until(server, lambda: answers(port, "/health"))
    return server, port


def until(server, holds):
    give_up = time.monotonic() + 300
    while not holds():
        assert server.poll() is None, server.stderr.read()
        assert time.monotonic() < give_up
        time.sleep(0.05)


def answers(port, path):
    try:
        ask(port, path)
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_server_that_loads_refuses_requests_and_ends_soon(model_dir, tmp_path, number):
    server, port = begin(model_dir, "--max-batch", "4", "--compile-ahead", JAXINFER_CACHE=str(tmp_path))
    with server:
        try:
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(port, "/v1/completions", {"model": "tiny", "prompt": "ab"})
        finally:
            server.send_signal(number)
            sent = time.monotonic()
            server.wait(60)
        seconds, errors = time.monotonic() - sent, server.stderr.read()
    with refused.value as answer:
        assert (answer.code, answer.headers["Retry-After"]) == (503, "5")
        assert json.loads(answer.read())["error"]["code"] == "loading"
    assert seconds < 10
    assert server.returncode == -number
    assert "Traceback" not in errors
    assert "Serving" not in errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["{there}/none"], "{there}/none: no such directory; name a model directory"),
        (["{model}", "--port", "{used}"], "cannot listen on 127.0.0.1, port {used}: Address already in use; choose"),
        (["{model}", "--host", "nowhere.invalid"], "cannot listen on nowhere.invalid, port 8000: "),
        (["{model}", "{model}"], "two models or adapters have the name 'tiny': give each its own."),
        (["{model}", "--adapter", "tiny=x"], "two models or adapters have the name 'tiny'"),
        (["{model}", "{model}", "--name", "a"], "--name is for one model: describe several in a FILE.toml."),
        (["{model}", "{model}", "--adapter", "a=b"], "--adapter is for one model: describe several in a FILE.toml"),
        ([], "name a MODEL to serve, or several, or a FILE.toml that describes them."),
        (["{model}", "x.toml"], "give models or one FILE.toml, not both"),
        (["x.toml", "--port", "80"], "--port has no effect with x.toml, which has all options: leave it out."),
        (["{model}", "--access-log", "{there}/a/b"], "access log {there}/a/b: No such file or directory; name a file"),
        (["x.toml"], "x.toml: No such file or directory; name a TOML file that describes a server."),
        (["{model}", "--context", "1"], "--context must be in [2, 128] for this model, got 1."),
    ],
)
def test_what_cannot_be_served_is_one_line(model_dir, tmp_path, given, message):
    with socket.create_server(("127.0.0.1", 0)) as used:
        places = {"there": tmp_path, "model": model_dir, "used": used.getsockname()[1]}
        port = [] if {"--port", "--host", "x.toml"} & {*given} else ["--port", str(free_port())]
        done = CliRunner().invoke(app, ["serve", *(part.format(**places) for part in given), *port])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message.format(**places)}")


def test_a_server_that_anybody_can_ask_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)
    port = str(free_port())
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), "--host", "0.0.0.0", "--port", port])
    assert done.exit_code == 2
    assert "Anybody who can reach 0.0.0.0 may ask this server" in done.stderr


@pytest.mark.slow
def test_a_file_describes_several_models(model_dir, tmp_path):
    (tmp_path / "a").symlink_to(model_dir)
    port = free_port()
    (tmp_path / "serve.toml").write_text(
        f"""port = {port}

[models.one]
path = "a"
max_batch = 4

[models.two]
path = "{model_dir}"
max_batch = 4

[models.three]
path = "{model_dir}"
dtype = "bfloat16"
max_batch = 2
context = 64
"""
    )
    command = [sys.executable, "-m", "jaxinfer", "serve", str(tmp_path / "serve.toml")]
    environment = {key: value for key, value in os.environ.items() if key != "JAXINFER_API_KEY"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            until(server, lambda: answers(port, "/ready"))
            models = json.loads(ask(port, "/v1/models"))["data"]
            body = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            texts = [json.loads(ask(port, "/v1/completions", body | {"model": name})) for name in ("one", "two")]
            running = json.loads(ask(port, "/running"))["running"]
        finally:
            server.send_signal(signal.SIGINT)
        errors = server.stderr.read()
    assert {model["id"]: model["max_model_len"] for model in models} == {"one": 128, "two": 128, "three": 64}
    assert [model["model"] for model in running] == ["one", "three"]  # the second is the first
    assert [text["model"] for text in texts] == ["one", "two"]
    assert texts[0]["choices"] == texts[1]["choices"]
    assert f"Serving one, two, three at http://127.0.0.1:{port}/v1" in errors
    assert server.returncode == 0
