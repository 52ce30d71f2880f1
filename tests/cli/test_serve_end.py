"""How a server ends: requests drain, and no client can hold it. With the real process, whose engine is slowed down."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.cli.test_serve import ask, free_port

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow

SLOW = """
import sys, time
from jaxinfer.generation.engine.engine import Engine
step, seconds = Engine.step, float(sys.argv[1])
def slow(self, max_passes=None):
    time.sleep(seconds)
    return step(self, 1)
Engine.step = slow
sys.argv = ["jaxinfer", *sys.argv[2:]]
from jaxinfer.http import listening
listening.STALLED_SECONDS = 2.0
from jaxinfer.__main__ import main
main()
"""
"""Serves with steps of one token, each of which takes as many seconds as the first argument says."""
TOKENS = 60


class Server:
    """A process that serves, and raw connections to it."""

    def __init__(self, model, seconds, *options):
        self.port = free_port()
        command = [sys.executable, "-c", SLOW, str(seconds), "serve", str(model), "--port", str(self.port)]
        command += ["--name", "tiny", "--max-batch", "4", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        give_up = time.monotonic() + 300
        while True:
            try:
                ask(self.port, "/ready")
                break
            except OSError:
                assert self.process.poll() is None
                assert time.monotonic() < give_up
                time.sleep(0.1)

    def connect(self, content=None, *, buffer=None):
        """Open a connection, and send a request for a stream."""
        client = socket.socket()
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.settimeout(60)
        client.connect(("127.0.0.1", self.port))
        if content is not None:
            body = json.dumps(
                {"model": "tiny", "stream": True, "temperature": 0, "ignore_eos": True} | content
            ).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
        return client

    def stream(self):
        """Begin a stream of TOKENS tokens; returns its connection after its first event."""
        client = self.connect({"prompt": "ab", "max_tokens": TOKENS})
        assert client.recv(100_000).startswith(b"HTTP/1.1 200 OK")
        return client

    def end(self, signal_number, *, within):
        """Send a signal; returns the exit status and what was written."""
        began = time.monotonic()
        self.process.send_signal(signal_number)
        return self.ended(began + within)

    def ended(self, until):
        errors = self.process.communicate(timeout=max(until - time.monotonic(), 0.1))[1]
        assert "Traceback" not in errors
        return self.process.returncode, errors


@pytest.fixture
def serve(model_dir):
    with contextlib.ExitStack() as stack:

        def serve(seconds, *options):
            server = Server(model_dir, seconds, *options)
            stack.callback(server.process.kill)
            return server

        yield serve


def rest(client):
    """All that a connection still brings."""
    with client:
        return b"".join(iter(lambda: client.recv(100_000), b""))


def status(port, path, body=None):
    try:
        ask(port, path, body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Retry-After"]
    return 200, None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_streams_end_and_others_are_refused(serve, number):
    server = serve(0.05)
    idle = server.connect()
    kept = server.connect({"prompt": "a", "max_tokens": 1})
    assert kept.recv(100_000)
    stream = server.stream()
    server.process.send_signal(number)
    time.sleep(0.5)
    assert status(server.port, "/ready") == (503, None)
    assert status(server.port, "/v1/completions", {"model": "tiny", "prompt": "a"}) == (503, "1")
    assert status(server.port, "/health") == (200, None)
    text = rest(stream)
    assert b'"finish_reason":"length"' in text
    assert b"data: [DONE]" in text
    code, errors = server.ended(time.monotonic() + 10)
    assert code == 0, errors
    rest(idle), rest(kept)


def test_what_has_not_ended_in_time_ends_with_an_error(serve):
    server = serve(0.5, "--drain-timeout", "1")
    stream = server.stream()
    code, errors = server.end(signal.SIGTERM, within=15)
    text = rest(stream)
    assert code == 0, errors
    assert b'"code":"unavailable"' in text
    assert b"data: [DONE]" in text


def test_a_second_interrupt_ends_it_at_once(serve):
    server = serve(0.5)
    stream = server.stream()
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert server.process.poll() is None
    code, _ = server.end(signal.SIGINT, within=10)
    assert code == -signal.SIGINT  # as shells expect of an interrupted program
    assert b'"code":"unavailable"' in rest(stream)


def unread(server):
    """A stream that is too long for all buffers, and is not read."""
    many = {"prompt": ["ab"] * 64, "max_tokens": TOKENS, "n": 4, "logprobs": 5}
    return server.connect(many, buffer=4096)


def test_a_client_that_never_reads_delays_no_end(serve):
    server = serve(0.0, "--drain-timeout", "1", "--max-queue-time", "600")
    with unread(server):
        time.sleep(1)
        code, errors = server.end(signal.SIGTERM, within=15)
    assert code == 0, errors


def test_a_client_that_never_reads_is_disconnected_and_delays_no_other(serve):
    """Otherwise the drain would wait for it."""
    server = serve(0.0, "--drain-timeout", "60", "--max-queue-time", "600")
    with unread(server):
        until = time.monotonic() + 8
        while time.monotonic() < until:
            assert b"data: [DONE]" in rest_of_stream(server)
        code, errors = server.end(signal.SIGTERM, within=10)
    assert code == 0, errors


def rest_of_stream(server):
    stream = server.connect({"prompt": "ab", "max_tokens": 4})
    with stream:
        text = b""
        while b"[DONE]" not in text and (part := stream.recv(100_000)):
            text += part
        return text
