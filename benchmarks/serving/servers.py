"""The servers that are compared, each with its best settings on a CPU."""

import asyncio
import subprocess
import sys
from pathlib import Path
from random import Random

from benchmarks.serving.processes import Server
from benchmarks.serving.settings import Settings
from benchmarks.workers import EngineError, find_peers
from jaxinfer.evaluation.serving.client import CompletionClient, LoadRequest, RequestRecord
from jaxinfer.evaluation.serving.load import run_closed, run_open

OURS, VLLM, LLAMA = "jaxinfer", "vllm-cpu", "llama_cpp.server"
CONTEXT = 1024
FIRST_CHARACTER, CHARACTERS = 0x4E00, 20_000
"""Tokens of `peers/make_served_model.py`, each a character."""


def our_server(model: Path, *options: str) -> Server:
    """Start `jaxinfer serve`."""
    command = [sys.executable, "-m", "jaxinfer", "serve", str(model), "--port", "{port}", "--dtype", "float32"]
    return Server(OURS, [*command, *options], JAXINFER_PROGRESS="0")


def vllm_server(settings: Settings, batch: int) -> Server:
    """Start the server of vLLM, in eager mode."""
    # The command `vllm` looks for a package of its own name.
    command = [settings.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.hf]
    command += ["--port", "{port}", "--dtype", "float32"]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(batch), "--enforce-eager"]
    command += ["--disable-uvicorn-access-log"]
    return Server(VLLM, command, ready="/health", VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="WARNING")


def llama_server(settings: Settings, batch: int, gguf: Path | None = None) -> Server:
    """Start llama_cpp.server, which runs one request after another; `batch` changes nothing."""
    python = find_peers(settings.peer_python, ("llama_cpp",))
    command = [python, "-m", "llama_cpp.server", "--model", gguf or settings.gguf, "--port", "{port}"]
    command += ["--n_ctx", str(CONTEXT), "--n_threads", str(settings.threads)]
    command += ["--n_threads_batch", str(settings.threads), "--interrupt_requests", "False", "--verbose", "False"]
    return Server(LLAMA, command, ready="/v1/models")


def absent_peers(settings: Settings) -> dict[str, str]:
    """The peers that cannot run here, with the reasons."""
    absent = {}
    for name, python, module in ((VLLM, settings.vllm_python, "vllm"), (LLAMA, settings.peer_python, "llama_cpp")):
        try:
            find_peers(python, (module,))
        except EngineError as error:
            absent[name] = str(error)
    return absent


def peer_version(settings: Settings, server: str) -> str:
    """A peer's package and its version; "" for our own server."""
    if server == OURS:
        return ""
    package, given = {VLLM: ("vllm-cpu", settings.vllm_python), LLAMA: ("llama-cpp-python", settings.peer_python)}[
        server
    ]
    code = f"import importlib.metadata as m; print({package!r}, m.version({package!r}))"
    return subprocess.run(
        [find_peers(given, ()), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def make_requests(count: int, prompt: int, output: int, *, seed: int = 0) -> list[LoadRequest]:
    """Draw requests whose lengths are uniform in 0.5 to 1.5 times these means, of random characters."""
    random = Random(seed)
    made = []
    for _ in range(count):
        length, tokens = (round(mean * random.uniform(0.5, 1.5)) for mean in (prompt, output))
        text = "".join(chr(FIRST_CHARACTER + random.randrange(CHARACTERS)) for _ in range(length))
        made.append(LoadRequest(prompt=text, output_tokens=tokens))
    return made


def ask(server: Server, requests: list[LoadRequest], *, concurrency: int | None = None) -> list[RequestRecord]:
    """Run a load: so many requests at a time, or each at its arrival (None)."""

    async def run() -> list[RequestRecord]:
        async with CompletionClient(f"http://127.0.0.1:{server.port}") as client:
            client.model = await client.find_model()
            if concurrency is None:
                return await run_open(client, requests)
            return await run_closed(client, requests, concurrency)

    return asyncio.run(run())
