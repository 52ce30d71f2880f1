"""What was made before a fork says so in the child, at once; nothing there waits for threads that it does not have."""

import subprocess
import sys

import pytest

from jaxinfer.compiled import Origin


def test_only_the_process_that_made_it():
    origin = Origin("This thing")
    assert not origin.forked
    origin.check()
    origin._pid -= 1
    assert origin.forked
    with pytest.raises(LookupError, match=r"This thing was made in process .* was forked: .*spawn"):
        origin.check(LookupError)


def in_a_child(script, *args):
    """Run a script up to `fork()`, and in its child what follows; returns what that says.

    The child ends as those of `multiprocessing` do: JAX cannot be taken down in a forked process.
    """
    command = [sys.executable, "-W", "ignore", "-c", FORK + script + "os._exit(0)", *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


FORK = """
import os, signal, sys, threading
def hold(*locks):  # another thread has them at the fork, and is not there in the child
    held = threading.Event()
    def wait():
        for lock in locks:
            lock.acquire()
        held.set()
        threading.Event().wait()
    threading.Thread(target=wait, daemon=True).start()
    held.wait()
def fork():
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    signal.alarm(60)  # what waits for ever ends so
def says(call):
    try:
        print(type(call()).__name__, flush=True)
    except Exception as error:
        print(type(error).__name__, "spawn" in str(error), flush=True)
"""

ASYNC_LLM = """
import asyncio
from jaxinfer import AsyncLLM, PoolingParams, SamplingParams
from jaxinfer.generation.api.preparation import Kind
served = AsyncLLM(sys.argv[1], max_batch=1, context=32, token_budget=32, max_decode_passes=1)
params = SamplingParams(max_tokens=2)
request, sequences = served.prepare("a"), None
served.submit("a", params).result()
hello = [{"role": "user", "content": "a"}]
asyncio.run(served.chat(hello, params).final())
prepared = served._preparation
templates = prepared._templates[Kind.CHAT]
hold(served._loop.lock, templates._lock, *(threads._shutdown_lock for threads in prepared._threads.values()))
fork()
print(templates.call(template="{{ 1 + 1 }}", arguments={}))
print(served.is_running, served.num_requests)
says(lambda: served.submit("a", params))
says(lambda: served.submit(request))
says(lambda: asyncio.run(served.generate("a", params).final()))
says(lambda: asyncio.run(served.embed("a")))
says(lambda: asyncio.run(served.chat(hello, params).final()))
served.abort("0")
served.close()
"""

LLM = """
from jaxinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], max_batch=1, token_budget=8, chunk_size=8)
params = SamplingParams(max_tokens=2)
llm.generate("a", params)
request = llm.prepare("a", params)
stream = llm.stream("b", params)
fork()
says(lambda: llm.generate("a", params))
says(lambda: llm.generate(request))
says(lambda: next(stream))
says(lambda: llm.embed("a"))
del stream
llm.close()
"""

SYSTEM = """
from pathlib import Path
from jaxinfer.experts import System
from tests.experts.boards import AnyProfiles, config, image
system = System(config(Path(sys.argv[1]), ["c0"]), profiles=AnyProfiles())
system.submit("c0", image(0)).result()
hold(system._decider.loop.lock)
fork()
says(lambda: system.submit("c0", image(0)))
says(lambda: next(system.run([("c0", image(0))])))
says(lambda: system.retry("c0"))
system.close()
"""

SERVICE = """
from jaxinfer.elastic import Service
from tests.elastic.vits import stripes
service = Service.from_checkpoint(sys.argv[1], repository=sys.argv[2], merge_levels=(), max_batch=1, max_classes=3)
service.measure_latency()
image = stripes(1).images[0]
service.submit(image, "stripes", deadline=60.0).result()
hold(service._catalogue.lock, service._registrar._registering, service._serving_loop.lock)
fork()
says(lambda: service.submit(image, "stripes", deadline=60.0))
says(lambda: service.classify(image, "stripes"))
says(lambda: service.profile("stripes", stripes(1)))
says(lambda: service.register_task("other", stripes(1)))
service.close()
"""


@pytest.mark.slow
def test_an_async_llm(model_dir):
    """Also where a thread held its lock."""
    said = in_a_child(ASYNC_LLM, model_dir)
    assert said == ["2", "False 0", "RuntimeError True", *["ClosedError True"] * 4]


def test_an_llm(model_dir):
    assert in_a_child(LLM, model_dir) == ["RuntimeError True"] * 4


@pytest.mark.slow
def test_a_system(board):
    assert in_a_child(SYSTEM, board) == ["ClosedError True"] * 3


@pytest.mark.slow
def test_a_service(vit, registered):
    assert in_a_child(SERVICE, vit, registered) == ["ClosedError True", *["RuntimeError True"] * 3]
