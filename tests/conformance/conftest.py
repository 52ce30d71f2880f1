"""A server process, and the environment with the tools that ask it."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-conformance"
SURE_TO_START = 300.0
AGENT = "claude-4-tiny"
END = "<end>"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"


def save_model_that_ends(path):
    """A tiny model for which as many tokens as can be end the text, none of them ASCII: every chat ends soon."""
    from jaxinfer.models.files.loading import save_model
    from tests.tiny import CONFIG, byte_tokenizer, random_model

    files = {
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode(),
    }
    model = random_model(dataclasses.replace(CONFIG, context=1024))
    save_model(path, model, family="tiny", tokenizer=files, eos_ids=tuple(range(94, 110)))
    return path


NEXT = {
    ":": 'H[{"',
    "H": "i",
    "i": ".",
    ".": END,
    ">": "W",
    "W": "e",
    "e": "l",
    "l": END,
    '"': "a}",
    "a": '"',
    "}": "}]",
    "{": '"',
}
"""What follows a character, the likeliest first: an answer is "Hi.", reasoning "Wel", and a string in JSON "a"."""


def save_model_that_answers(path):
    """A tiny model that looks at the last token alone, and whose chat template knows tools and reasoning.

    It is greedy, and its answers are short and not empty.
    """
    from jaxinfer.models.files.loading import save_model
    from tests.tiny import AGENT_TEMPLATE, ONE_KIND, byte_tokenizer, name_sampling, random_model

    tokenizer = byte_tokenizer()
    model = random_model(dataclasses.replace(ONE_KIND, context=2048, layers=1))
    embeddings = np.zeros(model.embed.table.shape, np.float32)
    head = np.zeros_like(embeddings)
    for dimension, (before, others) in enumerate(NEXT.items()):
        embeddings[tokenizer.token_to_id(before), dimension] = 1
        for rank, after in enumerate([others] if others == END else others):
            head[tokenizer.token_to_id(after), dimension] = 4 - rank
    layer = model.layers[0]
    for weight in (layer.attention.out.weight, layer.mlp.down.weight):
        weight[...] = np.zeros(weight.shape, weight.dtype)
    model.embed.table[...], model.head.weight[...] = embeddings, head
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": AGENT_TEMPLATE}).encode(),
    }
    source = path.with_name("source")
    save_model(source, model, family="tiny", tokenizer=files, eos_ids=(tokenizer.token_to_id(END),))
    return name_sampling(source, path, temperature=0.0)


@dataclasses.dataclass
class Server:
    """A `jaxinfer serve` process."""

    process: subprocess.Popen
    port: int
    log: Path

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def metric(self, name):
        """The sum of a metric's samples."""
        lines = [line for line in self.get("/metrics").splitlines() if line.replace("{", " ").split(" ")[0] == name]
        return sum(float(line.split()[-1]) for line in lines)

    def until_idle(self):
        """Wait until no request runs and no page of the KV cache is used."""
        give_up = time.monotonic() + 60
        while self.metric("jaxinfer_requests_running") or self.metric("jaxinfer_kv_pages_used"):
            assert time.monotonic() < give_up
            time.sleep(0.05)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextlib.contextmanager
def serving(models, log, *options, port=None, key=None):
    """A server from when it is ready until SIGTERM has ended it.

    Args:
      models: one, or several; none: those of a file, which names the port, too.
      port: None: any free one.
      key: the key that clients need.
    """
    port = port or free_port()
    paths = [str(path) for path in (models if isinstance(models, list) else [models])]
    command = [sys.executable, "-m", "jaxinfer", "serve", *paths, *(["--port", str(port)] if paths else []), *options]
    environment = {name: value for name, value in os.environ.items() if name != "JAXINFER_API_KEY"}
    environment |= {} if key is None else {"JAXINFER_API_KEY": key}
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, env=environment) as process:
        server = Server(process, port, log)
        try:
            give_up = time.monotonic() + SURE_TO_START
            while True:
                with contextlib.suppress(OSError):
                    server.get("/ready")
                    break
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < give_up
                time.sleep(0.1)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="session")
def model_that_ends(tmp_path_factory):
    return save_model_that_ends(tmp_path_factory.mktemp("conformance") / "tiny")


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory):
    """A server of a model that calls tools ten times, then two in parallel, and then answers."""
    from tests.http.test_agents import CALLED, call_of
    from tests.scripted import save_scripted

    both = call_of("read", "a") + call_of("write", "b", before="")
    answers = [*(call_of(*each) for each in CALLED), both, "Done."]
    model = save_scripted(tmp_path_factory.mktemp("conformance") / "scripted", answers)
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(model, log, "--max-batch", "4") as server:
        yield server
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="session")
def server(model_that_ends, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(model_that_ends, log, "--max-batch", "8", "--max-body-bytes", "100000") as server:
        yield server
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="session")
def agents(model_that_ends, tmp_path_factory):
    """A server of two models, of which AGENT answers, reasons, and calls functions when it must."""
    folder = tmp_path_factory.mktemp("agents")
    with serving([save_model_that_answers(folder / AGENT), model_that_ends], folder / "log") as server:
        yield server
    assert "Traceback" not in (folder / "log").read_text(), (folder / "log").read_text()


@pytest.fixture(scope="session")
def tool():
    """Runs a program of the environment with the tools; returns its output."""
    if not (TOOLS / ".conformance").exists():
        pytest.skip("make conformance sets up the clients and checkers")

    def run(program, *arguments, timeout=300, **options):
        command = [str(TOOLS / "bin" / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
