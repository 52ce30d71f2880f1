"""Programs are compiled when they are needed: the first query waits for few, the rest comes meanwhile."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from jaxinfer.compiled.spec import ProgramSpec
from jaxinfer.elastic import LevelError, Service
from jaxinfer.elastic.scheduling.policies import Elastic, FixedLevel
from jaxinfer.serving import ClosedError
from tests.elastic.vits import stripes

PATIENCE = 60
IMAGE = stripes(1).images[0]


class Compiler:
    """Notes what is compiled, and can be held."""

    def __init__(self, monkeypatch):
        self.begun, self.open = [], threading.Event()
        self.open.set()
        compile_it = ProgramSpec.compile

        def compile_slowly(spec, sizes, **options):
            adaptation = spec.static.adaptation
            self.begun.append((adaptation.prompts - max(adaptation.merges, default=0), sizes.batch))
            assert self.open.wait(PATIENCE)
            return compile_it(spec, sizes, **options)

        monkeypatch.setattr(ProgramSpec, "compile", compile_slowly)


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler(monkeypatch)
    yield made
    made.open.set()


def timed(service):
    """Give a service the measurements of an earlier process."""
    for level in service.levels:
        for batch in service.batch_sizes:
            service.latency.renew(level, batch, [0.001 * batch] * 5)
    return service


@pytest.fixture
def opened(vit, registered, options):
    """Opens services that have measurements, and compiles nothing; closes them at the end."""
    with contextlib.ExitStack() as stack:
        calls = {"jaxinfer-call"}  # what is compiled in the background ends before the next test counts
        stack.callback(until, lambda: calls.isdisjoint(thread.name for thread in threading.enumerate()))

        def open_service(**changed):
            service = timed(Service.from_checkpoint(vit, repository=registered, **options | changed))
            stack.callback(service.close, drain=False)
            return service

        yield open_service


def until(holds):
    give_up = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(1e-3)


def ask(service):
    return service.submit(IMAGE, "stripes", deadline=60.0)


def planned(service):
    return service._planning.decider._controller.policy.profile


def test_classifying_compiles_its_level_and_sizes_alone(opened, compiler):
    service = opened(max_batch=4)
    assert (service.compiled, service.levels, service.batch_sizes) == (0, (-4, 0, 2), (1, 2, 4))
    for images, level in ((3, 3), (1, 9)):
        with pytest.raises(LevelError):
            service.classify(stripes(images).images, "stripes", level)
    assert compiler.begun == []
    service.classify(stripes(2).images, "stripes", -4)
    service.classify(stripes(5).images, "stripes", 0)  # as 4 and 1
    assert (compiler.begun[0], sorted(compiler.begun[1:])) == ((-4, 2), [(0, 1), (0, 4)])
    assert service.compiled == 3


def test_a_first_query_waits_for_one_level_and_the_rest_comes_in_the_background(opened, compiler):
    service = opened(max_batch=4)
    compiler.open.clear()
    threading.Timer(0.2, compiler.open.set).start()
    first = ask(service)
    assert sorted(compiler.begun[:2]) == [(0, 1), (0, 4)]
    assert first.result(PATIENCE).level == 0
    until(lambda: service.compiled == 9)
    assert compiler.begun[2:5] == [(-4, 4), (2, 4), (-4, 1)]  # the fastest level first; a batch of any size fits it
    until(lambda: planned(service) == service.serving_profile())
    assert {ask(service).result(PATIENCE).level for _ in range(3)} <= {-4, 0, 2}


def test_sizes_that_are_missing_take_the_seconds_of_the_next(opened, compiler):
    service = opened(max_batch=4)
    service._catalogue.compile_first(service.serving_profile(), Elastic)
    profile = service._registrar.ready_profile()
    assert (profile.levels, profile.sizes) == ((0,), (1, 2, 4))
    assert profile.seconds[0, 2] == profile.seconds[0, 4] > 3 * profile.seconds[0, 1]


def test_no_query_waits_for_other_levels(opened, compiler):
    service = opened()
    service.classify(stripes(3).images, "stripes")  # level 0 is there
    compiler.open.clear()
    for _ in range(3):
        assert ask(service).result(PATIENCE).level == 0
    until(lambda: len(compiler.begun) == 3)
    assert planned(service).levels == (0,)
    compiler.open.set()
    until(lambda: planned(service).levels == (-4, 0, 2))


def test_a_policy_with_another_level_waits_for_that(opened, compiler):
    service = opened(policy=lambda profile: FixedLevel(profile, 2))
    assert ask(service).result(PATIENCE).level == 2
    assert sorted(compiler.begun[:2]) == [(2, 1), (2, 2)]


def test_start_waits_for_all(opened, compiler):
    service = opened()
    service.start()
    assert (service.compiled, planned(service).levels) == (6, (-4, 0, 2))
    begun = len(compiler.begun)
    assert ask(service).result(PATIENCE)
    assert len(compiler.begun) == begun == 6


def test_who_waits_for_a_program_goes_before_the_background(opened, compiler):
    service = opened()
    service.classify(stripes(3).images, "stripes")
    compiler.open.clear()
    ask(service).result(PATIENCE)
    until(lambda: len(compiler.begun) == 3)
    assert compiler.begun[2] == (-4, 2)
    calling = threading.Thread(target=service.classify, args=(stripes(3).images, "stripes", 2))
    calling.start()
    until(lambda: len(compiler.begun) == 5)
    compiler.open.set()
    calling.join(PATIENCE)
    assert sorted(compiler.begun[3:5]) == [(2, 1), (2, 2)]
    until(lambda: service.compiled == 6)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_the_end_does_not_wait_for_the_background_and_memory_goes_at_once(compiler, vit, registered, options, end):
    service = timed(Service.from_checkpoint(vit, repository=registered, **options))
    service.classify(stripes(3).images, "stripes")
    compiler.open.clear()
    ask(service).result(PATIENCE)
    until(lambda: len(compiler.begun) == 3)
    catalogue = service._catalogue
    leaves = map(weakref.ref, catalogue.programs._leaves)
    held = [weakref.ref(service), weakref.ref(catalogue), weakref.ref(catalogue.reservation), *leaves]
    del catalogue
    if end == "close":
        service.close()
    del service
    until(lambda: not [kept for kept in held if kept() is not None])
    compiler.open.set()
    until(lambda: not [x for x in threading.enumerate() if x.name == "jaxinfer-call"])
    assert len(compiler.begun) == 3


def test_a_close_ends_calls_that_wait_for_programs(opened, compiler):
    service, errors = opened(max_batch=4), []
    compiler.open.clear()

    def wait():
        try:
            service.compile_ahead()
        except ClosedError as error:
            errors.append(error)

    calling = threading.Thread(target=wait)
    calling.start()
    until(lambda: len(compiler.begun) == os.cpu_count() or len(compiler.begun) == 9)
    service.close()
    compiler.open.set()
    calling.join(PATIENCE)
    assert len(errors) == 1
    assert len(compiler.begun) == min(os.cpu_count(), 9)


@pytest.mark.parametrize("when", ["compile", "_admit", "warm_up"])
def test_an_interrupt_while_it_gets_ready_leaves_it_usable(opened, monkeypatch, when):
    service = opened()
    owner = service._catalogue if when == "_admit" else service._catalogue.programs

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, when, interrupt)
        for call in (service.start, lambda: ask(service)):
            with pytest.raises(KeyboardInterrupt):
                call()
    assert ask(service).result(PATIENCE).label
    service.start()
    assert planned(service).levels == (-4, 0, 2)


def test_a_program_whose_memory_is_not_there_is_not_used(opened, compiler, monkeypatch, caplog):
    service = opened()
    service.classify(stripes(3).images, "stripes")
    reserved = service._catalogue.reservation.sizes
    with monkeypatch.context() as patch:
        programs = service._catalogue.programs
        tenants = programs.tenants

        def large(batch, also=()):
            needed = tenants(batch, also)
            at_two = any(level == 2 for level, _ in also)
            return needed | {"programs' workspace": needed["programs' workspace"] + (1 << 60) * at_two}

        patch.setattr(programs, "tenants", large)
        assert ask(service).result(PATIENCE)
        until(lambda: planned(service).levels == (-4, 0) and len(compiler.begun) == 6)
        until(lambda: caplog.text.count("are not used") == 2)
        assert "Batches of 2 at level 2 are not used: Service vit would take" in caplog.text
        assert ask(service).result(PATIENCE).level in (-4, 0)
    assert service._catalogue.reservation.sizes.keys() == reserved.keys()
    service.classify(stripes(1).images, "stripes", 2)  # a call that asks for it tries again


UNCLOSED = """
import atexit, os, sys, threading, time
import jaxinfer.compiled.spec as spec
from jaxinfer.elastic import Service
from tests.elastic.vits import stripes

service = Service.from_checkpoint(sys.argv[1], repository=sys.argv[2], merge_levels=(-4,), max_batch=2, max_tasks=2,
                                  max_classes=3, schedule="constant")
for level in service.levels:
    for batch in service.batch_sizes:
        service.latency.renew(level, batch, [0.001] * 5)
compile_it, begun = spec.ProgramSpec.compile, []
def slowly(*args, **options):
    begun.append(args)
    time.sleep(0.5 * (len(begun) > 2))
    return compile_it(*args, **options)
spec.ProgramSpec.compile = slowly
print(service.submit(stripes(1).images[0], "stripes", deadline=60.0).result().level)
while len(begun) < 3:
    time.sleep(0.01)
if sys.argv[3] == "fork":
    if (child := os.fork()) == 0:
        try:
            service.classify(stripes(1).images, "stripes")
        except RuntimeError as error:
            print("forked" if "was forked" in str(error) else error, flush=True)
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(3)  # XLA's own end may crash where its threads are missing
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if sys.argv[3] == "interrupt":
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(
    ("how", "code", "printed"),
    [pytest.param("fork", 0, "0\nforked\n3\n", marks=pytest.mark.slow), ("interrupt", -2, "0\n")],
)
def test_the_end_of_the_process(vit, registered, how, code, printed):
    """It waits for the program that is being compiled, unless Ctrl-C has ended it."""
    command = [sys.executable, "-c", UNCLOSED, str(vit), str(registered), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr
    assert "Fatal" not in ended.stderr
