"""What a server process does with connections that are slow, broken, wrong or cut, and after `kill -9`."""

import contextlib
import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from tests.conformance.conftest import serving

pytestmark = pytest.mark.slow

BODY = b'{"model": "tiny", "prompt": "ab", "max_tokens": 2, "temperature": 0, "ignore_eos": true}'
LONG = {"model": "tiny", "prompt": "ab", "max_tokens": 1000, "ignore_eos": True, "stream": True}


def request(head, body=b"", path="/v1/completions", method="POST", version="1.1"):
    return f"{method} {path} HTTP/{version}\r\nHost: a\r\n{head}\r\n".encode() + body


def whole(body=BODY):
    return request(f"Content-Length: {len(body)}\r\n", body)


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def read_all(connection):
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def statuses(answer):
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", answer)]


CLOSE = "Connection: close\r\n"
LENGTH = f"Content-Length: {len(BODY)}\r\n"
CHUNKS = [b"5\r\n%s\r\n" % BODY[:5], b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY) - 5, BODY[5:])]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([request(LENGTH + CLOSE, BODY)], [200]),
        ([request(LENGTH, BODY, version="1.0")], [200]),
        ([request(LENGTH + CLOSE + "Content-Type: text/plain\r\n", BODY)], [200]),
        ([request(LENGTH + CLOSE + "Content-Type: application/x-www-form-urlencoded\r\n", BODY)], [200]),
        ([request("Transfer-Encoding: chunked\r\n" + CLOSE), *CHUNKS], [200]),
        ([request(LENGTH + CLOSE + "Expect: 100-continue\r\n"), BODY], [100, 200]),
        ([whole() + request(LENGTH + CLOSE, BODY)], [200, 200]),
        ([request("Content-Length: abc\r\n", BODY)], [400]),
        ([request("Content-Length: -1\r\n", BODY)], [400]),
        ([request("Transfer-Encoding: chunked\r\n", b"zz\r\n")], [400]),
        ([b"nonsense\r\n\r\n"], [400]),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], [400]),
        ([request(CLOSE, method="GET")], [405]),
        ([request(CLOSE, method="OPTIONS")], [405]),
        ([request(CLOSE, method="DELETE", path="/v1/models")], [405]),
        ([request(CLOSE, method="HEAD", path="/v1/models")], [200]),
        ([request(CLOSE, method="HEAD", path="/health")], [200]),
        ([request(CLOSE, method="GET", path="/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd")], [404]),
        ([request(CLOSE, method="GET", path="/../../etc/passwd")], [404]),
        ([request(f"Content-Length: {200_000}\r\n", b"a" * 200_000)], [413]),
        ([request("Content-Length: 1000000000000\r\n", b"a" * 200_000)], [413]),
    ],
)  # fmt: skip
def test_requests_of_all_kinds(server, sent, expected):
    with connect(server) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in sent:
                connection.sendall(part)
                time.sleep(0.05)
        if expected[-1] in (400, 413):
            connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert statuses(answer) == expected, answer
    assert b"Traceback" not in answer


def test_half_a_body_is_no_request(server):
    """Neither if the client leaves, nor while it waits; others are answered."""
    half = request(f"Content-Length: {len(BODY)}\r\n", BODY[:20])
    before = server.metric("jaxinfer_requests_ended_total")
    with connect(server) as connection:
        connection.sendall(half)
        connection.shutdown(socket.SHUT_WR)
        assert statuses(read_all(connection)) == []
    waiting = [connect(server) for _ in range(50)]
    for connection in waiting:
        connection.sendall(half[:-1])
    slow = connect(server)
    for at in range(len(whole())):  # a byte at a time
        slow.sendall(whole()[at : at + 1])
        time.sleep(0.002)
    assert slow.recv(12) == b"HTTP/1.1 200"
    for connection in (*waiting, slow):
        connection.close()
    server.until_idle()
    assert server.metric("jaxinfer_requests_ended_total") == before + 1


def test_clients_that_leave_midway_leave_nothing_behind(server):
    """64 at once, of which three in four leave after some of the answer."""
    server.until_idle()
    before = {name: server.metric(name) for name in ("jaxinfer_requests_ended_total", "jaxinfer_http_responses_total")}
    ended = []

    def ask(number):
        body = json.dumps(LONG | {"max_tokens": 60, "n": 1 + number % 2, "stream": number % 8 != 7}).encode()
        with connect(server) as connection:
            connection.sendall(whole(body).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            if number % 4:
                connection.recv(1 + 300 * (number % 5))
                if number % 3 == 0:  # a reset, not an orderly end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                ended.append(read_all(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert ended == [True] * 16, ended
    server.until_idle()
    after = {name: server.metric(name) for name in before}
    assert after["jaxinfer_requests_ended_total"] - before["jaxinfer_requests_ended_total"] == 64
    assert after["jaxinfer_http_responses_total"] - before["jaxinfer_http_responses_total"] == 64


def test_a_server_that_is_killed_and_started_again(model_that_ends, tmp_path):
    """Clients see their streams break, and the next server answers at the same address."""
    broken = []

    def read(connection):
        answer = read_all(connection)
        broken.append(answer.startswith(b"HTTP/1.1 200") and b"[DONE]" not in answer)

    with serving(model_that_ends, tmp_path / "first") as server:
        connections = [connect(server) for _ in range(4)]
        for connection in connections:
            connection.sendall(whole(json.dumps(LONG).encode()))
            assert connection.recv(1, socket.MSG_PEEK)
        readers = [threading.Thread(target=read, args=(connection,)) for connection in connections]
        for reader in readers:
            reader.start()
        server.process.send_signal(signal.SIGKILL)
        for reader in readers:
            reader.join(60)
        server.process.wait(60)
        with pytest.raises(urllib.error.URLError, match="Connection refused"):
            urllib.request.urlopen(server.url + "/health", timeout=10)
    for connection in connections:
        connection.close()
    assert broken == [True] * 4
    with serving(model_that_ends, tmp_path / "second", port=server.port) as again, connect(again) as connection:
        connection.sendall(request(LENGTH + CLOSE, BODY))
        assert statuses(read_all(connection)) == [200]
    assert "Traceback" not in (tmp_path / "second").read_text()
