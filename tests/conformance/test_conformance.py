"""Clients of the OpenAI API, and checkers of it, find what they expect at a server process."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.conftest import TOOLS, serving

HERE = Path(__file__).parent
CHATS = [
    "basic-response",
    "error-handling",
    "multi-turn",
    "streaming-response",
    "streaming-usage",
    "system-prompt",
    "tool-calling",
]
NOT_FOR_US = {
    "image-input": "the models take text alone, and images are refused",
    "reasoning-summary": "it is for models of OpenAI, and skips itself",
}
"""Tests of llm-comply that are left out, and why."""

pytestmark = pytest.mark.slow


def test_the_openai_client(server, tool):
    done = tool("python", HERE / "openai_python.py", server.url, "tiny")
    assert done.split()[-1] == "leaving"
    server.until_idle()


def test_an_agent_by_the_openai_client(scripted_server, tool):
    done = tool("python", HERE / "openai_agent.py", scripted_server.url, "scripted")
    assert done.split() == ["whole", "streamed"]
    scripted_server.until_idle()


def test_calls_are_right_for_bfcl(scripted_server, tool):
    kinds = tool("python", HERE / "bfcl_calls.py", scripted_server.url, "scripted", timeout=600).splitlines()
    counts = dict(line.split() for line in kinds)
    assert all(int(counts[kind]) >= 30 for kind in ("simple_python", "multiple")), counts


def test_limits_by_the_openai_client(model_that_ends, tool, tmp_path):
    with serving(model_that_ends, tmp_path / "log", "--max-requests", "1", key="secret") as server:
        done = tool("python", HERE / "openai_limits.py", server.url, "tiny", "secret")
    assert done.split() == ["keys", "overload"]


def test_the_openai_client_of_npm(server, tool):
    del tool  # its environment has the package
    node = shutil.which("node")
    if node is None or not (TOOLS / "node_modules/openai").exists():
        pytest.skip("needs node and npm")
    command = [node, HERE / "openai_node.mjs", TOOLS, server.url, "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    server.until_idle()


def test_llm_comply(server, tool):
    listed = tool("llm-comply", "--list", "--format", "openai-chat")
    assert {word for word in listed.split() if word.startswith("chat-")} == {
        f"chat-{name}" for name in (*CHATS, *NOT_FOR_US)
    }
    options = ["--format", "openai-chat", "--filter", ",".join(f"chat-{name}" for name in CHATS), "--verbose"]
    tool("llm-comply", *options, "--base-url", f"{server.url}/v1", "--api-key", "none", "--model", "tiny")


def test_schemathesis_finds_no_fault_of_the_server(server, tool, tmp_path):
    options = ["--checks", "not_a_server_error", "--max-examples", "40", "--seed", "1", "--workers", "2"]
    options += ["--request-timeout", "60"]
    tool("schemathesis", "run", f"{server.url}/openapi.json", *options, timeout=900, cwd=tmp_path)
    server.until_idle()
