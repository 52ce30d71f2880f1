"""`AsyncLLM` compiles what the first answer needs; the rest comes in the background."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.compiled import ProgramSpec
from jaxinfer.compiled import cache as cache_module
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.serving import ClosedError, FailedError
from tests.generation.conftest import SMALL, SMALL_BYTES

PATIENCE = 60
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
OPTIONS = {**SMALL, "cache_bytes": SMALL_BYTES}


class Compiler:
    """Notes the programs that begin to be compiled, and can be held, or fail: from now on, or in the background."""

    def __init__(self, monkeypatch):
        self.begun, self.error, self.open = [], None, threading.Event()
        self.open.set()
        self.before_background = lambda: None
        compile_it = ProgramSpec.compile

        def compile_slowly(spec, sizes, **options):
            self.begun.append(f"{spec.name}({sizes})")
            assert self.open.wait(PATIENCE)
            if self.error is not None:
                raise self.error
            return compile_it(spec, sizes, **options)

        begin = Engine.compile_in_background

        def compile_in_background(engine):
            self.before_background()
            begin(engine)

        monkeypatch.setattr(ProgramSpec, "compile", compile_slowly)
        monkeypatch.setattr(Engine, "compile_in_background", compile_in_background)
        monkeypatch.setattr(cache_module, "BACKGROUND_DELAY", 0.0)


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler(monkeypatch)
    yield made
    made.open.set()


@pytest.fixture(scope="module")
def programs_of_all(small_llm):
    """The names of all programs."""
    small_llm.engine.compile_ahead()
    return {f"{program.name}({program.sizes})" for program in small_llm.engine.executor.programs}


def until(holds):
    give_up = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(1e-3)


def compiled(llm):
    return {f"{program.name}({program.sizes})" for program in llm.engine.executor.programs}


def test_the_first_answer_waits_for_what_llm_compiles_and_the_rest_comes_after_it(model_dir, compiler, programs_of_all):
    with LLM(model_dir, **OPTIONS) as llm:
        (expected,) = llm.generate(["abc"], GREEDY)
        needed = compiled(llm)
    assert needed < programs_of_all
    with AsyncLLM(model_dir, **OPTIONS) as llm:
        assert compiled(llm) == set()
        begun = len(compiler.begun)
        compiler.before_background = compiler.open.clear
        answer = llm.submit("abc", GREEDY).result(PATIENCE)
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        until(lambda: len(compiler.begun) > begun + len(needed))
        assert set(compiler.begun[begun:-1]) == compiled(llm) == needed
        assert llm.submit("xyz", GREEDY).result(PATIENCE)  # it needs no others
        assert len(compiler.begun) == begun + len(needed) + 1
        compiler.open.set()
        until(lambda: compiled(llm) == programs_of_all)
        assert llm.stats().compile_misses == 0


def test_all_can_be_compiled_before_the_first_request(model_dir, compiler, programs_of_all):
    with AsyncLLM(model_dir, compile_ahead=True, **OPTIONS) as llm:
        assert compiled(llm) == programs_of_all
    with pytest.raises(ValueError, match=r"AsyncLLM\.compile_ahead must be True or False, got 1"):
        AsyncLLM(model_dir, compile_ahead=1, **OPTIONS)


def test_a_request_that_runs_beside_another_waits_for_its_own_programs_alone(model_dir, compiler, monkeypatch):
    with AsyncLLM(model_dir, **OPTIONS) as llm:
        monkeypatch.setattr(llm.engine, "compile_in_background", lambda: None)
        assert llm.submit("abc", GREEDY).result(PATIENCE)
        assert llm.submit("abc" * 10, GREEDY).result(PATIENCE)  # it needs more, and nobody runs who would wait for it
        assert llm.stats().compile_misses == 0
        stepping, stepped = threading.Semaphore(0), threading.Event()
        step = llm.engine.step

        def gated(max_passes=None):
            stepped.set()
            assert stepping.acquire(timeout=PATIENCE)
            return step(max_passes)

        monkeypatch.setattr(llm.engine, "step", gated)
        first = llm.submit("abc", GREEDY)
        assert stepped.wait(PATIENCE)
        second = llm.submit("abd", GREEDY)
        stepping.release(1000)
        assert first.result(PATIENCE)
        assert second.result(PATIENCE)
        assert llm.stats().compile_misses > 0


def test_an_error_ends_the_requests_that_it_concerns(model_dir, compiler, caplog):
    with AsyncLLM(model_dir, **OPTIONS) as llm:
        compiler.error = RuntimeError("no compiler")
        with pytest.raises(FailedError, match="RuntimeError: no compiler"):
            llm.submit("abc", GREEDY).result(PATIENCE)
        compiler.error = None
        assert llm.submit("abc", GREEDY).result(PATIENCE)
        assert llm.is_running
    assert not [record for record in caplog.records if record.exc_info]


def test_an_error_in_the_background_is_said_once(model_dir, compiler, caplog):
    with AsyncLLM(model_dir, **OPTIONS) as llm:
        compiler.before_background = lambda: setattr(compiler, "error", RuntimeError("full\ndisk"))
        assert llm.submit("abc", GREEDY).result(PATIENCE)
        until(lambda: caplog.records)
        compiler.error = None
        answers = [llm.submit(prompt, GREEDY) for prompt in ("abc", "abc" * 10, "abd", "x")]
        assert all(answer.result(PATIENCE) for answer in answers)
    (record,) = caplog.records
    assert record.getMessage().startswith("Programs are compiled only when a request needs them, since ")
    assert record.getMessage().endswith(" could not be compiled in the background: full")


@pytest.mark.parametrize("end", ["close", "drop"])
def test_the_end_does_not_wait_for_the_background_and_memory_goes_at_once(model_dir, compiler, end):
    llm = AsyncLLM(model_dir, **OPTIONS)
    begun = len(compiler.begun)
    compiler.before_background = compiler.open.clear
    assert llm.submit("abc", GREEDY).result(PATIENCE)
    begun += len(compiled(llm)) + 1
    until(lambda: len(compiler.begun) == begun)
    held = [weakref.ref(llm._loaded.reservation), *map(weakref.ref, llm.model.leaves.values())]
    if end == "close":
        llm.close()
    del llm
    gc.collect()
    until(lambda: not [kept for kept in held if kept() is not None])
    compiler.open.set()
    until(lambda: "jaxinfer-call" not in {thread.name for thread in threading.enumerate()})
    assert len(compiler.begun) == begun


def test_a_close_does_not_wait_for_what_the_first_request_waits_for(model_dir, compiler):
    llm = AsyncLLM(model_dir, **OPTIONS)
    begun = len(compiler.begun)
    compiler.open.clear()
    answered = llm.submit("abc", GREEDY)
    until(lambda: len(compiler.begun) > begun)
    llm.close()
    assert isinstance(answered.exception(PATIENCE), ClosedError)


UNCLOSED = """
import sys
from jaxinfer import AsyncLLM, SamplingParams
from jaxinfer.compiled import cache
cache.BACKGROUND_DELAY = float(sys.argv[3])
llm = AsyncLLM(sys.argv[1], **eval(sys.argv[2]))
print(len(llm.submit("abc", SamplingParams(max_tokens=2, ignore_eos=True)).result().outputs[0].token_ids))
if sys.argv[3] == "0":
    while len(list(llm.engine.executor.programs)) < int(sys.argv[4]):
        pass
"""


@pytest.mark.slow
def test_the_end_of_the_process(model_dir, programs_of_all):
    """With a program that is being compiled, and before the first one of the background."""
    for delay, programs in (("0", len(programs_of_all)), ("1000", 0)):
        command = [sys.executable, "-c", UNCLOSED, str(model_dir), repr(OPTIONS), delay, str(programs)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")
