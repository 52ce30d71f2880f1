"""Ctrl-C while programs compile, which XLA does not notice."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxinfer.compiled.interruptible import interruptible

PATIENCE = 120.0

# Compiling, as slow as it can be: as XLA does, it holds no lock of the interpreter, and notices no signal.
SLOW = """
import ctypes, os, signal, sys, threading
import jax
compile, slow = jax.stages.Lowered.compile, threading.Event()
def compile_slowly(self, compiler_options=None):
    if slow.is_set():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.write(1, b"compiling\\n")  # whole, whichever threads do so at once
        while slow.is_set():
            ctypes.CDLL(None).usleep(int(float(os.environ["SLOW"]) * 1e6))
    return compile(self, compiler_options=compiler_options)
jax.stages.Lowered.compile = compile_slowly
"""

CALL = """
from jaxinfer import LLM, SamplingParams
llm = LLM(
    sys.argv[1], max_batch=2, context=16, token_budget=16, chunk_size=16, max_decode_passes=1,
    logits_processors={"own": lambda logits, history, length: logits},
)
params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
slow.set()
try:
    llm.generate(["a", "b"] if sys.argv[2] == "many" else "a", params)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
AGAIN = """
slow.clear()
print(len(llm.generate("a", params)[0].outputs[0].token_ids))
"""
CLI = """
slow.set()
from jaxinfer.__main__ import main
sys.argv[1:] = ["generate", sys.argv[1], "--prompt", "a", "--max-tokens", "2"]
main()
"""


def interrupted(script, *args, slow="0.01", env=None):
    """Run a script, and interrupt it when it compiles; its output, return code and seconds from then to its end."""
    environment = {**os.environ, "SLOW": slow, **(env or {})}
    command = [sys.executable, "-c", SLOW + script, *map(str, args)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            while process.stdout.readline() != "compiling\n":
                assert process.poll() is None, process.stderr.read()
            time.sleep(0.3)  # until the caller waits
            process.send_signal(signal.SIGINT)
            begun = time.monotonic()
            out, err = process.communicate(timeout=PATIENCE)
            return out, err, process.returncode, time.monotonic() - begun
        finally:
            process.kill()


def interrupt_unnoticed():
    """Send SIGINT to this thread: as if it had come just before the main thread's wait, it ends no wait."""
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


def test_a_call_goes_on_without_its_caller(monkeypatch):
    go_on, ended = threading.Event(), threading.Event()

    def call():
        assert go_on.wait(PATIENCE)
        ended.set()
        return 5

    timer = threading.Timer(0.1, interrupt_unnoticed)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        interruptible(call)
    timer.join()
    go_on.set()
    assert ended.wait(PATIENCE)
    assert interruptible(call) == 5
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["one", "many"])
def test_a_call_in_python_is_interrupted_and_the_next_one_works(model_dir, what):
    out, err, code, _ = interrupted(CALL + AGAIN, model_dir, what)
    assert [line for line in out.splitlines() if line != "compiling"] == ["interrupted", "4"], err
    assert (code, err) == (0, "")


@pytest.mark.slow
def test_the_process_ends_at_once(model_dir):
    """Here by SIGINT, as Python's own end of an interrupted process is."""
    out, err, code, seconds = interrupted(CALL, model_dir, "one", slow="1000")
    assert (out.splitlines()[-1], err, code) == ("interrupted", "", -signal.SIGINT)
    assert seconds < 60


def test_the_command_line_ends_at_once(model_dir, tmp_path):
    _, err, code, seconds = interrupted(CLI, model_dir, slow="1000", env={"JAXINFER_CACHE": str(tmp_path)})
    assert code == -signal.SIGINT
    assert "Traceback" not in err
    assert seconds < 60


LATE = """
import atexit
from jaxinfer.compiled.background import Turns, compile_in_background
atexit.register(lambda: compile_in_background(Turns(), lambda tried: None))
"""


def test_a_process_ends_that_begins_a_call_at_its_end():
    ended = subprocess.run([sys.executable, "-c", LATE], capture_output=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
