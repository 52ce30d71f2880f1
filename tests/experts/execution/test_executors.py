"""What goes wrong while experts run: each request ends once, with an error of its kind, and others go on."""

import asyncio
import dataclasses
import os
import shutil
import threading
import time

import jax
import numpy as np
import pytest

from jaxinfer.checkpoints import layer_files, stores
from jaxinfer.execution.forward import Forward
from jaxinfer.experts.errors import (
    ExecutorDiedError,
    InvalidInputError,
    LoadError,
)
from jaxinfer.experts.execution.kinds import Classifier
from jaxinfer.experts.execution.loader import write_expert
from jaxinfer.experts.scheduling import quarantine
from jaxinfer.models.files.loading import open_model
from jaxinfer.serving.errors import ClosedError, DeadlineExceededError, OverloadedError
from tests.experts.boards import CLASSIFIERS, COSTS, expert_bytes, image, probabilities

SECONDS = 20


def is_right(board, name, value, result):
    return np.allclose(result.stages[0].judgement.probabilities, probabilities(board / name, value), atol=1e-5)


class Gate:
    """`os.preadv` that waits while the gate is closed."""

    def __init__(self):
        self.open, self.waiting = threading.Event(), threading.Event()
        self.open.set()

    def __call__(self, handle, buffers, offset):
        if not self.open.is_set():
            self.waiting.set()
        self.open.wait(SECONDS)
        return os.preadv(handle, buffers, offset)


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open.set()


@pytest.fixture
def blocked(start, gate):
    """A system whose only executor waits for c1, which c0 makes room for; and the request for it."""

    def made(**changes):
        system = start("c0", "c1", "c2", **{"mode": "paper", "slots": 1, "preadv": gate, **changes})
        gate.open.clear()
        first = system.submit("c1", image(0))
        assert gate.waiting.wait(SECONDS)
        return system, first

    return made


@pytest.fixture
def judging(monkeypatch):
    """Has `judge` of classifiers call this first, which may raise; it is given how many have begun before."""
    hook, judge, count = [], Classifier.judge, [0]

    def judged(self, outputs, number):
        count[0] += 1
        if hook:
            hook[0](count[0] - 1)
        return judge(self, outputs, number)

    monkeypatch.setattr(Classifier, "judge", judged)
    return hook.append


# Before anything begins


def test_overload(board, blocked, gate):
    system, first = blocked(max_waiting=2)
    others = [system.submit("c0", image(1)), system.submit("c2", image(2))]
    with pytest.raises(OverloadedError, match="2 requests wait, the limit is 2; try again in") as error:
        system.submit("c0", image(3))
    assert error.value.retry_after > 0
    gate.open.set()
    assert all(future.result(SECONDS).stages for future in [first, *others])
    assert is_right(board, "c0", image(3), system.submit("c0", image(3)).result(SECONDS))


def test_deadline(blocked, gate):
    system, first = blocked()
    late, patient = system.submit("c0", image(1), deadline=0.01), system.submit("c2", image(1), deadline=SECONDS)
    time.sleep(0.02)
    gate.open.set()
    with pytest.raises(DeadlineExceededError):
        late.result(SECONDS)
    assert first.result(SECONDS).verdict
    assert patient.result(SECONDS).verdict


def test_a_deadline_ends_a_request_while_nothing_else_happens(blocked, gate):
    """The only executor waits for its expert, and goes on waiting."""
    system, first = blocked()
    with pytest.raises(DeadlineExceededError):
        system.submit("c0", image(1), deadline=0.05).result(SECONDS)
    assert not first.done()
    gate.open.set()
    assert first.result(SECONDS).verdict
    assert system.stats().switches == 1  # none for the one that was late


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), -1.0, "soon", True])
def test_deadlines_that_cannot_be(start, deadline):
    with pytest.raises(InvalidInputError, match="deadline must be a finite number >= 0"):
        start("c0").submit("c0", image(0), deadline=deadline)


def until(holds):
    give_up = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(1e-3)


def test_cancel(board, blocked, gate):
    system, first = blocked()
    given_up, other = system.submit("c0", image(1)), system.submit("c0", image(2))
    assert given_up.cancel()
    until(lambda: system.scheduler.queued == 1)
    assert first.cancel()  # its expert is on its way: it does not run for nobody
    gate.open.set()
    assert is_right(board, "c0", image(2), other.result(SECONDS))
    system.close(timeout=SECONDS)
    assert system.stats().requests == 1


def test_a_cancelled_coroutine_gives_its_request_up(blocked, gate):
    system, _ = blocked()

    async def judge():
        task = asyncio.ensure_future(system.submit("c0", image(1)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(judge())
    until(lambda: not system.scheduler.queued)


def test_what_follows_a_cancelled_request_does_not_run(start, judging):
    begun, go_on = threading.Event(), threading.Event()

    def hook(number):
        begun.set()
        go_on.wait(SECONDS)

    judging(hook)
    system = start("c0", "c1", slots=3, rules=[("c0", "ok", "c1"), ("c0", "defect", "c1")], mode="paper")
    system.graph.next = lambda expert, verdict: pytest.fail("nobody waits")
    future = system.submit("c0", image(0))
    assert begun.wait(SECONDS)
    assert future.cancel()
    go_on.set()
    system.close(timeout=SECONDS)
    assert system.stats().requests == 1


# Weights that cannot be loaded


@pytest.fixture
def copies(board, tmp_path, monkeypatch):
    """Experts that a test may damage, and their files."""
    monkeypatch.setattr(layer_files, "FIRST_DELAY", 1e-3)
    monkeypatch.setattr(quarantine, "FIRST_BACK_OFF", 0.5)
    files = {}
    for name in ("c0", "c1", "c2"):
        shutil.copytree(board / name, tmp_path / name, ignore=shutil.ignore_patterns("layers-*"))
        files[name] = write_expert(open_model(tmp_path / name)) / "layer-00000.bin"
    return tmp_path, files


def damage(file, how):
    content = file.read_bytes()
    file.write_bytes(content[:-1] if how == "truncated" else content[:99] + bytes([content[99] ^ 4]) + content[100:])
    return content


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_damaged_file_ends_the_requests_of_its_expert(board, start, copies, how):
    folder, files = copies
    system = start("c0", "c1", folder=folder, slots=1, mode="paper")  # c0 is there
    content = damage(files["c1"], how)
    good = system.submit("c0", image(0))
    with pytest.raises(LoadError, match="'c1' cannot be loaded"):
        system.submit("c1", image(0)).result(SECONDS)
    assert is_right(board, "c0", image(0), good.result(SECONDS))
    with pytest.raises(LoadError, match=r"'c1' is tried again in 0.* s"):
        system.submit("c1", image(0))
    files["c1"].write_bytes(content)
    time.sleep(0.6)
    assert is_right(board, "c1", image(0), system.submit("c1", image(0)).result(SECONDS))


def test_an_error_has_the_stages_before_it(start, copies):
    folder, files = copies
    system = start("c0", "c1", folder=folder, slots=1, rules=[("c0", "ok", "c1"), ("c0", "defect", "c1")], mode="paper")
    damage(files["c1"], "truncated")
    with pytest.raises(LoadError, match="'c1' cannot be loaded") as raised:
        system.submit("c0", image(0)).result(SECONDS)
    assert [stage.expert for stage in raised.value.output.stages] == ["c0"]
    assert isinstance(raised.value.__cause__, Exception)


def test_damage_that_is_there_at_the_start(board, start, copies):
    folder, files = copies
    damage(files["c0"], "flipped")
    system = start("c0", "c1", folder=folder, slots=2)
    assert list(system.broken) == ["c0"]
    assert system.initial_experts >= {"c1"}
    with pytest.raises(LoadError, match="c0"):
        system.submit("c0", image(0)).result(SECONDS)
    assert is_right(board, "c1", image(0), system.submit("c1", image(0)).result(SECONDS))


def test_no_expert_can_be_loaded(start, copies):
    folder, files = copies
    for file in files.values():
        damage(file, "flipped")
    system = start("c0", "c1", "c2", folder=folder, slots=1)
    futures = [system.submit(name, image(0)) for name in ("c0", "c1", "c2")]
    for future in futures:
        with pytest.raises(LoadError):
            future.result(SECONDS)
    assert system.stats().failed == 3


def without_memory(monkeypatch, when):
    """Have arrays come to the device as if it had no memory left, where `when` says so of how many came before."""
    call, count = stores._FromDisk.place, [0]

    def place(self):
        count[0] += 1
        if when(count[0] - 1):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")
        return call(self)

    monkeypatch.setattr(stores._FromDisk, "place", place)
    return count


def test_a_load_that_finds_no_memory_is_tried_again(board, start, monkeypatch):
    system = start(*CLASSIFIERS, slots=3, mode="paper")
    count = without_memory(monkeypatch, lambda number: number == 0)
    others = [name for name in CLASSIFIERS if name not in system.initial_experts]
    for name in (others[0], *sorted(system.initial_experts)):
        assert is_right(board, name, image(0), system.submit(name, image(0)).result(SECONDS))
    assert count[0] >= 2
    assert system.stats().failed == 0
    assert system.scheduler.manager.limited
    assert system.scheduler.manager.pools[0].budget < 3 * expert_bytes(board / "c0")


def test_a_device_with_less_memory_than_was_given_at_the_start(board, start, monkeypatch):
    without_memory(monkeypatch, lambda number: number == 1)
    system = start("c0", "c1", slots=2, mode="paper")
    assert len(system.initial_experts) == 1
    assert not system.broken
    for name in ("c0", "c1"):
        assert is_right(board, name, image(0), system.submit(name, image(0)).result(SECONDS))


def test_a_repaired_expert_can_be_asked_for_at_once(board, start, copies, monkeypatch):
    monkeypatch.setattr(quarantine, "FIRST_BACK_OFF", 1000.0)
    folder, files = copies
    system = start("c0", "c1", folder=folder, slots=1, mode="paper")
    content = damage(files["c1"], "flipped")
    with pytest.raises(LoadError):
        system.submit("c1", image(0)).result(SECONDS)
    files["c1"].write_bytes(content)
    with pytest.raises(LoadError, match="is tried again in"):
        system.submit("c1", image(0))
    system.retry("c1")
    assert is_right(board, "c1", image(0), system.submit("c1", image(0)).result(SECONDS))


# Batches that fail


def failing(monkeypatch, fails):
    """Have programs run out of memory where `fails` says so of a batch."""
    program, sizes = Forward.program, []

    def limited(self, batch):
        sizes.append(batch)
        return no_memory if fails(sizes) else program(self, batch)

    def no_memory(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")

    monkeypatch.setattr(Forward, "program", limited)
    return sizes


def test_a_batch_that_does_not_fit_runs_in_halves(board, blocked, gate, monkeypatch):
    system, first = blocked(costs=dataclasses.replace(COSTS, max_batch=4), max_batch=4)
    sizes = failing(monkeypatch, lambda sizes: sizes[-1] > 2)
    values = [image(number) for number in range(4)]
    futures = [system.submit("c0", value) for value in values]
    gate.open.set()
    assert all(is_right(board, "c0", value, x.result(SECONDS)) for value, x in zip(values, futures, strict=True))
    assert first.result(SECONDS).verdict
    assert sizes == [1, 4, 2, 2]


def test_halves_that_do_not_fit_fail(board, blocked, gate, monkeypatch):
    system, first = blocked(costs=dataclasses.replace(COSTS, max_batch=4), max_batch=4)
    sizes = failing(monkeypatch, lambda sizes: sizes[-1] > 1)
    futures = [system.submit("c0", image(number)) for number in range(4)]
    other = system.submit("c2", image(0))
    gate.open.set()
    for future in futures:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            future.result(SECONDS)
    assert is_right(board, "c2", image(0), other.result(SECONDS))
    assert first.result(SECONDS).verdict
    assert sizes == [1, 4, 2, 1]


def test_a_batch_whose_answers_cannot_be_read_fails_alone(board, start, judging):
    def hook(number):
        if number == 0:
            raise KeyError("label")

    judging(hook)
    system = start("c0", "c1", slots=2)
    with pytest.raises(KeyError):
        system.submit("c0", image(0)).result(SECONDS)
    assert is_right(board, "c0", image(0), system.submit("c0", image(0)).result(SECONDS))


# Threads that end


class Killed(BaseException):
    """What no batch raises."""


def test_the_requests_of_an_executor_that_dies_run_elsewhere(board, start, judging):
    begun, go_on = threading.Event(), threading.Event()

    def hook(number):
        if number == 0:
            begun.set()
            go_on.wait(SECONDS)
            raise Killed

    judging(hook)
    system = start("c0", "c1", slots=2, executors=2, mode="paper")
    first = system.submit("c0", image(0))
    assert begun.wait(SECONDS)
    values = [image(number) for number in range(8)]
    others = [system.submit("c0", value) for value in values]
    go_on.set()
    with pytest.raises(ExecutorDiedError, match="executor 'x0' has ended"):
        first.result(SECONDS)
    for value, future in zip(values, others, strict=True):
        result = future.result(SECONDS)
        assert is_right(board, "c0", value, result)
    assert {future.result().stages[0].executor for future in others} == {"x1"}
    system.close(timeout=SECONDS)


def test_no_executor_is_left(start, judging):
    submitted = threading.Event()

    def hook(number):
        submitted.wait(SECONDS)
        raise Killed

    judging(hook)
    system = start("c0", "c1", slots=2, executors=2, mode="paper")
    futures = [system.submit(name, image(0)) for name in ("c0", "c1") * 4]
    submitted.set()
    for future in futures:
        with pytest.raises(ExecutorDiedError):
            future.result(SECONDS)
    with pytest.raises(ExecutorDiedError, match="no executor that is left"):
        system.submit("c0", image(0))
    system.close(timeout=SECONDS)


def test_a_load_that_ends_by_what_is_no_error(board, start, monkeypatch):
    system = start("c0", "c1", slots=1, mode="paper")
    monkeypatch.setattr(quarantine, "FIRST_BACK_OFF", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(system._runner.loader, "_load", lambda load, source: (_ for _ in ()).throw(Killed))
        with pytest.raises(LoadError, match="Killed"):
            system.submit("c1", image(0)).result(SECONDS)
    time.sleep(0.02)
    assert is_right(board, "c1", image(0), system.submit("c1", image(0)).result(SECONDS))


# Memory that experts give to batches


def test_what_copies_to_the_host_cost_follows_what_they_take(start):
    """They were measured to cost a fraction of what they do."""
    costs = dataclasses.replace(COSTS, load={"disk": 1e-5, "host": 1e-9}, evict=1e-9)
    system = start("c0", "c1", slots=1, host=1, costs=costs)
    for turn in range(40):
        system.submit(f"c{turn % 2}", image(0)).result(SECONDS)
    assert system.profiles[system.experts["c0"].architecture.name, "cpu"].evict > 1e-5


@pytest.mark.parametrize("mode", ["best", "paper"])
def test_experts_make_room_for_batches(board, start, mode):
    """Evictions for a batch may wait for a load's; nothing waits for itself."""
    costs = dataclasses.replace(COSTS, activation_bytes=3000)
    system = start(slots=2, executors=2, activation=1000, costs=costs, mode=mode, host=1)
    rng = np.random.default_rng(0)
    given = [(f"c{rng.integers(5)}", image(int(rng.integers(9)))) for _ in range(60)]
    futures = [system.submit(name, value) for name, value in given]
    for (name, value), future in zip(given, futures, strict=True):
        assert is_right(board, name, value, future.result(SECONDS))
    assert system.stats().evictions > 0


def test_a_copy_to_the_host_that_fails_ends_its_executor_alone(start, monkeypatch):
    costs = dataclasses.replace(COSTS, activation_bytes=3000)
    system = start(slots=2, executors=2, activation=1000, costs=costs, mode="paper", host=1)
    begin_eviction, failed = system._runner.loader.begin_eviction, []

    def fails(*args):
        leave = begin_eviction(*args)

        def leaves():
            leave()
            if not failed:
                failed.append(True)
                raise RuntimeError("no memory on the host")

        return leaves

    monkeypatch.setattr(system._runner.loader, "begin_eviction", fails)
    rng = np.random.default_rng(0)
    futures = [system.submit(f"c{rng.integers(5)}", image(0)) for _ in range(60)]
    ends = {type(future.exception(SECONDS)) for future in futures}
    assert failed
    assert ends <= {type(None), ExecutorDiedError}
    assert system.submit("c0", image(0)).result(SECONDS).verdict


# The end


def test_drain(board, blocked, gate):
    system, first = blocked()
    others = [system.submit("c0", image(1)), system.submit("c2", image(2))]
    threading.Timer(0.05, gate.open.set).start()
    system.close()
    assert all(future.done() for future in (first, *others))
    assert is_right(board, "c2", image(2), others[1].result())
    with pytest.raises(ClosedError, match="system is closed"):
        system.submit("c0", image(0))
    system.close()


def test_draining_accepts_nothing_new(blocked, gate):
    system, first = blocked()
    closing = threading.Thread(target=system.close)
    closing.start()
    while system.is_running:
        time.sleep(1e-3)
    with pytest.raises(ClosedError):
        system.submit("c0", image(0))
    gate.open.set()
    closing.join(SECONDS)
    assert first.result(0).verdict


@pytest.mark.parametrize("drain", [True, False])
def test_a_load_that_hangs_does_not_hang_the_end(blocked, gate, drain):
    system, first = blocked()
    other = system.submit("c0", image(1))
    begun = time.monotonic()
    system.close(drain=drain, timeout=0.1)
    assert time.monotonic() - begun < 5
    for future in (first, other):
        with pytest.raises(ClosedError, match="system is closed"):
            future.result(0)


def test_leaving_the_context_by_an_error_drops_what_waits(blocked, gate):
    system, first = blocked()
    other = system.submit("c0", image(1))
    threading.Timer(0.05, gate.open.set).start()
    with pytest.raises(ZeroDivisionError), system:
        _ = 1 / 0
    with pytest.raises(ClosedError):
        other.result(0)
    assert first.done()
