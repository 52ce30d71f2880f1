"""What users hold ends alike: closed once or more, dropped, at exit; memory and threads go, and calls say so."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import jax
import pytest

from jaxinfer import LLM, AsyncLLM, Embedder, SamplingParams
from jaxinfer.elastic import Service
from jaxinfer.experts import ConfigError, System
from jaxinfer.generation.execution import memory
from jaxinfer.serving import ClosedError
from jaxinfer.serving.budget import HOST, BudgetError, Reservation, all_budgets, host_budget
from jaxinfer.serving.heap import trim_heap
from tests.elastic.vits import stripes
from tests.experts.boards import AnyProfiles, config, image
from tests.generation.conftest import SMALL, SMALL_BYTES

PATIENCE = 60
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def kinds(model_dir, vit, registered, service_options, board):
    """Of each class how one is made, and asked."""

    def make_service():
        service = Service.from_checkpoint(vit, repository=registered, **service_options)
        service.measure_latency()
        return service

    return {
        LLM: (lambda: LLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL), lambda llm: llm.generate("a", SHORT)),
        Embedder: (lambda: Embedder(model_dir, max_batch=2, context=64), lambda embedder: embedder.embed("a")),
        AsyncLLM: (
            lambda: AsyncLLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL),
            lambda llm: llm.submit("a", SHORT).result(PATIENCE),
        ),
        System: (
            lambda: System(config(board, ["c0", "c1"], slots=1, host=1), profiles=AnyProfiles()),
            lambda system: list(system.run((name, image(0)) for name in ("c0", "c1", "c0"))),
        ),
        Service: (
            make_service,
            lambda service: service.submit(stripes(1).images[0], "stripes", deadline=60.0).result(PATIENCE),
        ),
    }


@pytest.fixture(params=[LLM, pytest.param(Embedder, marks=pytest.mark.slow), AsyncLLM, System, Service])
def kind(request, kinds):
    """How one of them is made, and asked."""
    gc.collect()  # what other tests have left
    return kinds[request.param]


def arrays():
    """Bytes on all devices, and in the host's memory that is theirs."""
    return sum(array.nbytes for array in jax.live_arrays())


def reserved():
    """What owners have of all memories: bytes by owner and tenant."""
    found = Counter[tuple[str, str]]()
    for budget in all_budgets():
        for held in budget.holdings:
            found[held.owner, held.tenant] += held.bytes
    return found


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("jaxinfer")}


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_close_gives_all_back(kind):
    make, ask = kind
    before, already, others = arrays(), threads(), reserved()
    with make() as held:
        for wrong in (float("nan"), -1, "1", True):
            with pytest.raises(ValueError, match="timeout must be a number of seconds, at least 0, or None, got"):
                held.close(timeout=wrong)
        ask(held)
        assert arrays() > before
        mine = reserved() - others
        assert {owner.split()[0] for owner, _ in mine} == {type(held).__name__}
        assert {name: budget.reserved for name, budget in held.budgets.items()} == {HOST: reserved().total()}
        held.close(timeout=3e38)  # longer than a lock can be waited for
    assert arrays() == before
    assert reserved() == others
    wait_until(lambda: threads() == already)  # those that read files are not waited for: a disk may hang
    for drain, timeout in ((True, 1), (True, 10**400), (False, float("inf"))):
        held.close(drain=drain, timeout=timeout)
    with pytest.raises(ClosedError, match=f"This {type(held).__name__}|This s") as raised:
        ask(held)
    assert "is closed" in str(raised.value)


def test_what_is_dropped_unclosed_is_given_back(kind):
    make, ask = kind
    before, already, others = arrays(), threads(), reserved()
    held = make()
    ask(held)
    assert reserved().total() > others.total()
    del held
    wait_until(lambda: arrays() == before)
    assert reserved() == others
    wait_until(lambda: threads() == already)


def test_a_second_one_that_does_not_fit_is_refused_and_told_who_has_the_memory(kind, monkeypatch):
    make, ask = kind
    with make() as first, monkeypatch.context() as patch:
        host = host_budget()
        patch.setattr(host, "capacity", host.reserved + 1)
        before = host.holdings
        with pytest.raises((BudgetError, ConfigError), match=r" more of the host \(in all: .* 1 byte") as refused:
            make()
        assert host.holdings == before
        assert f"\n  {type(first).__name__} " in str(refused.value)
        ask(first)


@pytest.mark.slow
def test_a_cache_has_the_pages_that_others_leave(model_dir, monkeypatch):
    # A workspace that is larger than what reads the weights, which is freed before the cache is made.
    chunks = SMALL | {"token_budget": 32, "chunk_size": 8}
    host, other = host_budget(), Reservation("System board")
    monkeypatch.setattr(host, "capacity", host.reserved + (64 << 20))
    monkeypatch.setattr(memory, "AMPLE", 1 << 30)
    with LLM(model_dir, **chunks) as llm:
        plan = llm.memory

    def leave(size):
        other.resize({(host, "experts"): (64 << 20) - plan.weights - int(size / memory.FRACTION) - 1})

    leave(plan.workspace + 5 * plan.page_bytes)
    with LLM(model_dir, **chunks) as llm:
        assert llm.memory.num_pages == 5 < plan.num_pages
    leave(plan.workspace)
    with pytest.raises(ValueError, match=r"(?s)The KV cache may take .*\n  System board, experts: "):
        LLM(model_dir, **chunks)


def test_the_system_has_its_memory_back(model_dir):
    """Not the C library, which would keep it for a next time."""
    llm = LLM(model_dir, max_batch=4096)
    llm.generate("a", SHORT)
    trim_heap()  # of what compiling has left
    before, cache = resident(), llm.memory.cache
    llm.close()
    assert before - resident() > 0.9 * cache > 100 << 20


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Stepping:
    """Lets an engine's steps pass one by one."""

    def __init__(self, engine, monkeypatch):
        self.step, self.entered, self.passes = engine.step, threading.Event(), threading.Semaphore(0)
        monkeypatch.setattr(engine, "step", self)

    def __call__(self, max_passes=None):
        self.entered.set()
        assert self.passes.acquire(timeout=PATIENCE)
        return self.step(max_passes)


@pytest.fixture
def llm(model_dir):
    with LLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL) as llm:
        llm.generate("a", SHORT)
        yield llm


def in_thread(call):
    """Have it called in another thread; what it has given, or raised, is in the list once the thread has ended."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.mark.parametrize(("drain", "timeout"), [(True, None), (True, 0.05), (False, None)])
def test_calls_of_other_threads_end_or_are_given_up(llm, monkeypatch, drain, timeout):
    expected = llm.generate("b", LONG)[0].outputs[0].token_ids
    stepping = Stepping(llm.engine, monkeypatch)
    calling, found = in_thread(lambda: llm.generate("b", LONG)[0].outputs[0].token_ids)
    assert stepping.entered.wait(PATIENCE)
    closing, closed = in_thread(lambda: llm.close(drain=drain, timeout=timeout))
    wait_until(lambda: llm._ending)
    with pytest.raises(ClosedError, match="This LLM is closed"):
        llm.generate("c", SHORT)
    if timeout or not drain:
        closing.join(PATIENCE)
    stepping.passes.release(1000)
    for thread in (calling, closing):
        thread.join(PATIENCE)
    assert closed == [None]
    if drain and timeout is None:
        assert found == [expected]
    else:
        assert isinstance(found[0], ClosedError)


def test_a_stream_that_is_not_read_is_given_up(llm):
    stream = llm.stream("a", LONG, max_passes=1)
    assert next(stream).outputs[0].token_ids
    llm.close()
    with pytest.raises(ClosedError, match="is closed"):
        next(stream)


def test_a_signal_closes_what_it_interrupts(llm, monkeypatch):
    step = llm.engine.step

    def interrupted(max_passes=None):
        signal.raise_signal(signal.SIGUSR1)
        return step(max_passes)

    before = signal.signal(signal.SIGUSR1, lambda *_: llm.close())
    monkeypatch.setattr(llm.engine, "step", interrupted)
    try:
        with pytest.raises(ClosedError, match="is closed"):
            llm.generate("a", LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_in_the_block_gives_calls_up(model_dir, monkeypatch):
    llm = AsyncLLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL)
    stepping = Stepping(llm.engine, monkeypatch)
    future = llm.submit("a", LONG)
    assert stepping.entered.wait(PATIENCE)
    threading.Timer(0.05, stepping.passes.release, (1000,)).start()
    with pytest.raises(KeyError), llm:
        raise KeyError
    assert isinstance(future.exception(PATIENCE), ClosedError)


def test_an_event_loop_that_ends_gives_its_requests_up(kinds):
    """Of each that coroutines call."""
    system, service, llm = (kinds[kind][0]() for kind in (System, Service, AsyncLLM))

    async def main():
        calls = [system.submit("c0", image(0)), service.submit(stripes(1).images[0], "stripes", deadline=60.0)]
        tasks = [asyncio.ensure_future(call) for call in [*calls, llm.generate("a", LONG).final()]]
        await asyncio.sleep(0)
        return tasks

    with system, service, llm:
        asyncio.run(main())
        wait_until(lambda: not llm.num_requests and not service.num_requests and not system.num_requests)


AT_EXIT = """
import sys, threading
from jaxinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], cache_bytes=int(sys.argv[2]), **eval(sys.argv[3]))
begun = threading.Event()
def run():
    while True:
        for output in llm.stream("a", SamplingParams(max_tokens=60, ignore_eos=True)):
            begun.set()
threading.Thread(target=run, daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
def test_the_end_of_the_process_stops_a_call(model_dir):
    command = [sys.executable, "-c", AT_EXIT, model_dir, str(SMALL_BYTES), repr(SMALL)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0
    assert "Fatal" not in run.stderr
