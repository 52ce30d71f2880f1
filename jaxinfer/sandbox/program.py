"""The process of a `Sandbox`: `python -m jaxinfer.sandbox.program FUNCTION BYTES`.

It reads lines of JSON, the arguments of a function, and answers each with {result} or {error}.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

MEMORY_BYTES = 256_000_000
"""Bytes that the process may take beyond those it starts with, unless it is told otherwise."""
FUNCTIONS = {
    "render": "jaxinfer.sandbox.templates",
    "check_grammar": "jaxinfer.sandbox.grammars",
    "try_tokenizer": "jaxinfer.sandbox.tokenizer_files",
}
"""The modules of the functions that sandboxes run."""


def find(name: str) -> Callable[..., Any]:
    """Import a function that sandboxes run, by its name."""
    return getattr(importlib.import_module(FUNCTIONS[name]), name)


def answer(function: Callable[..., Any], requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        try:
            written = json.dumps({"result": function(**json.loads(line))}).encode()
        except MemoryError:
            written = json.dumps({"error": "MemoryError"}).encode()
        except (TypeError, ValueError) as error:
            written = json.dumps({"error": str(error)}).encode()
        answers.write(written + b"\n")
        answers.flush()


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more. Only Linux says how much it has; elsewhere its time is limited."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + more
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    function = find(sys.argv[1])
    limit_memory(int(sys.argv[2]))
    answer(function, sys.stdin.buffer, sys.stdout.buffer)
