"""Whatever ends a call before its time, wherever, the next call finds the engine as if it had never been."""

import dataclasses
import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import jaxinfer.generation.engine as engine_room
from jaxinfer.generation import LLM
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import SamplingParams
from jaxinfer.sharding import MeshConfig
from tests.generation.conftest import SMALL, SMALL_BYTES
from tests.tiny import CONFIG, save_tiny

PROMPTS = ["a cab had a bad cafe bead", "a cab had a bad cafe face", "deaf", [97, 98, 99] * 9]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, n=2)
ROOM = str(Path(engine_room.__file__).parent)


class Interrupt(BaseException):
    """Ctrl-C, or whatever else is no `Exception`."""


LANES = pytest.param(MeshConfig(data=2), marks=pytest.mark.slow)
STAGES = pytest.param(MeshConfig(pipeline=2), marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[None, LANES, STAGES], ids=["one device", "two lanes", "two stages"])
def llm(model_dir, request, tmp_path_factory):
    if request.param == MeshConfig(pipeline=2):  # the layers of `model_dir` are of two kinds: each stage has both here
        model_dir = save_tiny(tmp_path_factory.mktemp("models") / "four", config=dataclasses.replace(CONFIG, layers=4))
    return LLM(model_dir, cache_bytes=SMALL_BYTES, mesh=request.param, **SMALL)


def pages_of(engine):
    """The pages of the engine, or of its first lane."""
    return getattr(engine.scheduler, "lanes", [engine.scheduler])[0].pages


def texts(llm):
    outputs = llm.generate(PROMPTS, PARAMS)
    assert not [c.error for output in outputs for c in output.outputs if c.finish_reason is FinishReason.ERROR]
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def expected(llm):
    """What a fresh engine says: nothing of it has been interrupted yet."""
    return texts(llm)


def assert_as_new(llm, expected):
    assert texts(llm) == expected
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.scheduler.sequences
    assert texts(llm) == expected  # from the cache of prefixes


PHASES = {
    "schedule": lambda engine: (engine.scheduler, "schedule"),
    "launch": lambda engine: (engine.executor, "launch"),
    "run": lambda engine: (engine.executor.passes, "run"),
    "collect": lambda engine: (engine.executor, "collect"),
    "process": lambda engine: (engine._outputs, "process"),
    "commit": lambda engine: (engine.scheduler, "commit"),
    "add": lambda engine: (engine.scheduler, "add"),
    "abort": lambda engine: (engine.scheduler, "remove"),
    "insert": lambda engine: (pages_of(engine), "insert"),
    "allocate": lambda engine: (pages_of(engine), "allocate"),
    "wait": lambda engine: (engine.executor, "wait"),
    "restart": lambda engine: (engine.executor, "restart"),
}


def interrupting(function, error, *, call, before):
    """The function, of which one call raises, before or after it has done its work."""
    calls = itertools.count(1)

    def interrupted(*args, **kwargs):
        now = next(calls) == call
        if now and before:
            raise error
        result = function(*args, **kwargs)
        if now:
            raise error
        return result

    return interrupted


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_in_any_phase(llm, expected, monkeypatch, phase, before):
    for call in (1, 4):
        with monkeypatch.context() as patch:
            if phase in ("wait", "restart"):  # a second Ctrl-C, while the first one is cleaned up after
                commit = interrupting(llm.engine.scheduler.commit, Interrupt, call=2, before=True)
                patch.setattr(llm.engine.scheduler, "commit", commit)
                call = 1
            owner, name = PHASES[phase](llm.engine)
            patch.setattr(owner, name, interrupting(getattr(owner, name), Interrupt, call=call, before=before))
            with pytest.raises(Interrupt):
                llm.generate(PROMPTS, PARAMS)
        assert_as_new(llm, expected)


@pytest.mark.parametrize("phase", ["schedule", "commit"])
def test_an_exception_of_the_scheduler_harms_nobody(llm, expected, monkeypatch, caplog, phase):
    with monkeypatch.context() as patch:
        owner, name = PHASES[phase](llm.engine)
        patch.setattr(owner, name, interrupting(getattr(owner, name), RuntimeError("injected"), call=3, before=False))
        assert texts(llm) == expected
    assert "Scheduling failed" in caplog.text
    assert_as_new(llm, expected)


def test_a_scheduler_that_always_fails_ends_requests_with_its_error(llm, expected, monkeypatch):
    def fail(max_passes=None):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "schedule", fail)
        outputs = llm.generate(PROMPTS, PARAMS)
    assert {c.error for output in outputs for c in output.outputs} == {"RuntimeError: injected"}
    assert_as_new(llm, expected)


def interrupt_at(line, function):
    """Call the function and interrupt it before the n-th line that it runs in the engine's room; how many it ran."""
    count = 0

    def trace_line(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise Interrupt
        return trace_line

    def trace(frame, event, arg):
        return trace_line if frame.f_code.co_filename.startswith(ROOM) else None

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return count


def test_an_interrupt_before_any_line(llm, expected):
    count = interrupt_at(0, lambda: texts(llm))
    assert count > 5000
    for line in random.Random(0).sample(range(1, count), 25):
        try:
            interrupt_at(line, lambda: texts(llm))  # measured times decide how many lines there are
        except Interrupt:  # while its traceback keeps what each frame held
            assert texts(llm) == expected
        llm.engine.scheduler.check_integrity()
        assert not llm.engine.scheduler.sequences


@pytest.mark.parametrize("error", [None, RuntimeError("injected")])
def test_a_close_waits_for_what_is_on_the_devices(model_dir, monkeypatch, error):
    llm = LLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL)
    engine, executor = llm.engine, llm.engine.executor
    engine.add(llm.prepare(PROMPTS[0], PARAMS).sequences())
    engine.step()
    waited, wait = [], executor.wait

    def recorded(step):
        waited.append(step)
        wait(step)
        if error is not None:
            raise error

    monkeypatch.setattr(executor, "wait", recorded)
    expected = list(engine._in_flight)
    assert expected
    llm.close()
    assert waited == expected
    for array in jax.tree.leaves([result.output for step in waited for result in step.output[1]]):
        assert array.is_ready()


INTERRUPTED = """
import os, signal, sys, threading
from jaxinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], max_batch=1, context=4096, chunk_size=4096, token_budget=4096, prefix_caching=False)
prompt, params = [97] * 4000, SamplingParams(temperature=0, max_tokens=1)
llm.generate([prompt], params)
launch = llm.engine.executor.launch
def interrupted(batch):
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
    return launch(batch)
llm.engine.executor.launch = interrupted
try:
    llm.generate([prompt], params)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_ends_while_its_devices_work_does_not_abort(tmp_path):
    """With a pass that takes longer than the end of the process."""
    config = dataclasses.replace(CONFIG.with_mlp(hidden=2048), context=4096, embed=512, layers=8)
    model = save_tiny(tmp_path / "model", config=config)
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, model], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_a_run_that_never_began_is_in_nobodys_way(llm, expected):
    run = llm.engine.run([llm.prepare(prompt, PARAMS).sequences() for prompt in PROMPTS])
    assert texts(llm) == expected
    next(run)
    with pytest.raises(RuntimeError, match="runs other requests"):
        texts(llm)
    run.close()
    assert_as_new(llm, expected)


def step_until(llm, done):
    while not done():
        llm.engine.step(1)


def test_an_interrupted_step_fails_only_the_sequence_whose_results_were_being_written(llm, expected, monkeypatch):
    requests = [llm.prepare(prompt, PARAMS).sequences() for prompt in PROMPTS]
    sequences = [sequence for group in requests for sequence in group]
    llm.engine.add(sequences)
    step_until(llm, lambda: any(s.num_output_tokens and not s.finished for s in sequences))
    victim = next(s for s in sequences if s.num_output_tokens and not s.finished)

    def interrupt(token):
        raise Interrupt

    monkeypatch.setattr(victim.detokenizer, "push", interrupt)
    with pytest.raises(Interrupt):
        step_until(llm, lambda: False)
    step_until(llm, lambda: all(s.finished for s in sequences))
    llm.engine.drain()
    assert victim.finish_reason is FinishReason.ERROR
    for sequence, tokens in zip(sequences, expected, strict=True):
        if sequence is not victim:
            assert sequence.token_ids[sequence.num_prompt_tokens :] == tokens
    assert_as_new(llm, expected)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["device", "disk"])
@pytest.mark.filterwarnings(  # a signal may come in what hypothesis does after a garbage collection
    "ignore:Exception ignored in. <function gc_cumulative_time:pytest.PytestUnraisableExceptionWarning"
)
def test_signals_at_random_times(model_dir, weights):
    llm, rng = LLM(model_dir, weights=weights, **SMALL | {"max_decode_passes": 1}), random.Random(1)
    expected = texts(llm)

    def interrupt(*_):
        raise KeyboardInterrupt

    before, interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        seconds = min(_seconds(lambda: texts(llm)) for _ in range(3))
        while interrupted < 200:
            llm.engine.scheduler.pages.clear()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, seconds))
                texts(llm)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
                assert texts(llm) == expected
                llm.engine.scheduler.check_integrity()
                assert not llm.engine.scheduler.sequences
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
