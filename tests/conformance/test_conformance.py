"""Clients of the OpenAI API and of Anthropic's, and checkers of both, find what they expect at a server process."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.conftest import AGENT, TOOLS, serving
from tests.tiny import byte_tokenizer

HERE = Path(__file__).parent
CHATS = ["basic-response", "system-prompt", "multi-turn", "streaming-response", "streaming-usage"]
OF_AGENTS = ["tool-calling", "error-handling"]
RESPONSES = [
    *("basic-response", "system-prompt", "multi-turn", "streaming-response", "streaming-usage", *OF_AGENTS),
    *("assistant-phase", "response-output-phase-schema", "compact-response", "compact-missing-model"),
]
NOT_FOR_US = {
    "image-input": "the models take text alone, and images are refused",
    "reasoning-summary": "it is for models of OpenAI, and skips itself",
}
"""Tests of llm-comply that are left out, and why."""
MESSAGES = [
    *("basic-response", "system-prompt", "multi-turn", "streaming-response", "streaming-usage", *OF_AGENTS),
    "thinking-display",  # runs for names of models that reason, such as AGENT
]

pytestmark = pytest.mark.slow


def test_the_openai_client(server, tool):
    done = tool("python", HERE / "openai_python.py", server.url, "tiny")
    assert done.split()[-1] == "leaving"
    server.until_idle()


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_an_agent_by_a_client(scripted_server, tool, client):
    done = tool("python", HERE / f"{client}_agent.py", scripted_server.url, "scripted")
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


def test_the_openai_client_of_responses(agents, tool):
    done = tool("python", HERE / "openai_responses.py", agents.url, AGENT)
    assert done.split()[-1] == "ends"
    agents.until_idle()


def npm(package, script, server, model):
    """Run a script by a client of npm."""
    node = shutil.which("node")
    if node is None or not (TOOLS / "node_modules" / package).exists():
        pytest.skip("needs node and npm")
    command = [node, HERE / script, TOOLS, server.url, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    server.until_idle()


def test_the_openai_client_of_npm(server, tool):
    del tool  # its environment has the package
    npm("openai", "openai_node.mjs", server, "tiny")


def test_an_agent_by_the_anthropic_client_of_npm(scripted_server, tool):
    del tool
    npm("@anthropic-ai/sdk", "anthropic_node.mjs", scripted_server, "scripted")


@pytest.mark.parametrize(
    ("kind", "prefix", "names"),
    [
        ("openai-chat", "chat-", [*CHATS, *OF_AGENTS]),
        ("open-responses", "", RESPONSES),
        ("anthropic", "anth-", MESSAGES),
    ],
)
def test_which_tests_of_llm_comply_are_run(tool, kind, prefix, names):
    listed = re.findall(r"^  ([\w-]+)  ", tool("llm-comply", "--list", "--format", kind), re.MULTILINE)
    assert {name.removeprefix(prefix) for name in listed} - NOT_FOR_US.keys() == {*names}


def comply(tool, server, model, kind, names):
    options = ["--format", kind, "--filter", ",".join(names), "--verbose"]
    done = tool("llm-comply", *options, "--base-url", f"{server.url}/v1", "--api-key", "none", "--model", model)
    assert " skipped" not in done


def test_llm_comply(server, tool):
    comply(tool, server, "tiny", "openai-chat", [f"chat-{name}" for name in CHATS])


def test_llm_comply_with_agents(agents, tool):
    comply(tool, agents, AGENT, "openai-chat", [f"chat-{name}" for name in OF_AGENTS])
    comply(tool, agents, AGENT, "open-responses", RESPONSES)
    comply(tool, agents, AGENT, "anthropic", [f"anth-{name}" for name in MESSAGES])


def test_the_anthropic_client(agents, tool):
    nothing = byte_tokenizer().encode("\0").ids[0]
    done = tool("python", HERE / "anthropic_python.py", agents.url, AGENT, nothing)
    assert done.split()[-1] == "leaving"
    agents.until_idle()


def test_schemathesis_finds_no_fault_of_the_server(server, tool, tmp_path):
    options = ["--checks", "not_a_server_error", "--max-examples", "40", "--seed", "1", "--workers", "2"]
    options += ["--request-timeout", "60"]
    tool("schemathesis", "run", f"{server.url}/openapi.json", *options, timeout=900, cwd=tmp_path)
    server.until_idle()
