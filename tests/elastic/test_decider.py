"""Queries served live: answers, deadlines, overload, faults, cancelling, closing; nobody waits for ever."""

import asyncio
import contextlib
import dataclasses
import gc
import shutil
import threading
import time
import weakref
from concurrent.futures import CancelledError, wait
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.compiled import DeviceTime
from jaxinfer.elastic import (
    ElasticError,
    InvalidImageError,
    ProfileError,
    Service,
    TrainingConfig,
    UnknownTaskError,
)
from jaxinfer.elastic.decider import QueryDecider
from jaxinfer.elastic.latency import NEWEST
from jaxinfer.elastic.runner import LevelRunner
from jaxinfer.elastic.scheduling.controller import Controller
from jaxinfer.elastic.scheduling.policies import Elastic, FixedLevel
from jaxinfer.serving.errors import ClosedError, DiedError, FailedError, OverloadedError, ShedError
from tests.elastic.serving import profile
from tests.elastic.vits import stripes
from tests.generation.wrong import JSON


class Device:
    """Takes `slower` times as long as the profile says; can be held, and can fail."""

    def __init__(self, scale=0.1, slower=1.0):
        self.profile, self.open, self.fails, self.ran = profile(scale), threading.Event(), None, []
        self.slower, self.observed = slower, []
        self.open.set()

    def launch(self, level, queries):
        if self.fails:
            raise self.fails
        self.ran.append((level, [query.payload for query in queries]))
        return time.perf_counter() + self.slower * self.profile.batch_seconds(level, len(queries)), queries

    def collect(self, launched):
        ends, queries = launched
        assert self.open.wait(120)
        time.sleep(max(ends - time.perf_counter(), 0))
        return [(query.payload, np.ones(1)) for query in queries]

    def expected_seconds(self, level, count):
        return self.profile.batch_seconds(level, count)

    def observe(self, level, count, seconds):
        self.observed.append(seconds)


@pytest.fixture
def start():
    """Deciders on a device, closed at the end."""
    deciders = []

    def made(device, policy=Elastic, max_waiting=1000):
        deciders.append(QueryDecider(device, policy(device.profile), max_waiting=max_waiting))
        return deciders[-1]

    yield made
    for decider in deciders:
        decider.loop.close(drain=False)


def ask(decider, payload, latency=5.0, utility=1.0, task="cifar10"):
    return decider.serve(task, payload, latency=latency, utility=utility)


def until(holds):
    """Wait for what another thread does."""
    give_up = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(1e-3)


def test_answers(start):
    decider = start(Device())
    answers = [future.result(120) for future in [ask(decider, f"image {i}") for i in range(200)]]
    assert [answer.label for answer in answers] == [f"image {i}" for i in range(200)]
    for answer in answers:
        assert answer.in_time
        assert answer.queue_seconds >= 0
        assert answer.compute_seconds > 0
    statistics = decider.statistics
    assert (statistics.answered, statistics.late, statistics.shed, statistics.failed) == (200, 0, 0, 0)
    assert statistics.levels.total() == 200
    assert statistics.batches < 200  # they share batches


def test_batches_follow_one_another(start):
    """A batch that is sent while another runs begins when that one ends, so that no second is counted twice."""
    decider, begun = start(Device(scale=0.2)), time.perf_counter()
    futures = []
    for number in range(200):
        futures.append(ask(decider, number))
        time.sleep(0.0005)
    answers = [future.result(120) for future in futures]
    elapsed = time.perf_counter() - begun
    seconds = {answer.batch: answer.compute_seconds for answer in answers}
    assert len(seconds) == decider.statistics.batches
    assert 0 < sum(seconds.values()) <= elapsed
    assert all(0 <= answer.queue_seconds < elapsed for answer in answers)


def test_what_cannot_be_in_time_is_shed_at_once(start):
    decider = start(Device())
    with pytest.raises(ShedError, match=r"no answer could have come within 1e-06 s"):
        ask(decider, "late", latency=1e-6).result(120)
    assert ask(decider, "next").result(120).label == "next"
    assert decider.statistics.shed == 1


def test_overload_is_refused_and_told(start):
    device = Device()
    decider = start(device, max_waiting=5)
    device.open.clear()
    futures = [ask(decider, i) for i in range(5)]
    with pytest.raises(OverloadedError, match="5 requests are in flight already"):
        ask(decider, 5)
    device.open.set()
    assert [future.result(120).label for future in futures] == list(range(5))
    assert ask(decider, 6).result(120).label == 6


def test_what_is_worth_most_goes_first(start):
    """While the device is held, more comes than it can do in time: what is shed is worth little."""
    device = Device(scale=1.0)
    decider = start(device)
    device.open.clear()
    first = ask(decider, "first", latency=60.0)
    time.sleep(0.05)
    cheap = [ask(decider, "cheap", latency=0.6, utility=0.01) for _ in range(640)]
    dear = [ask(decider, "dear", latency=0.6, utility=1.0) for _ in range(256)]
    device.open.set()
    assert first.result(120).label == "first"
    done, _ = wait(cheap + dear, timeout=20)
    assert len(done) == len(cheap) + len(dear)
    answered = [sum(future.exception() is None for future in group) / len(group) for group in (cheap, dear)]
    assert answered[1] > 0.9 > answered[0]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e308, np.ones(1), Decimal("NaN"), "1"])
def test_bad_numbers(start, value):
    decider = start(Device())
    for name in ("latency", "utility"):
        with pytest.raises(ValueError, match=f"{name} must be a finite number >= 0"):
            ask(decider, "image", **{name: value})
    assert ask(decider, "image", latency=Decimal(5), utility=np.float32(3e38)).result(120).label == "image"
    assert ask(decider, "image").result(120).label == "image"


def test_a_batch_that_fails_ends_its_own_queries(start):
    device = Device()
    decider = start(device)
    device.fails = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        ask(decider, "image").result(120)
    device.fails = None
    assert ask(decider, "image").result(120).label == "image"
    assert decider.statistics.failed == 1


def test_cancelled_queries_do_not_run(start):
    device = Device()
    decider = start(device)
    device.open.clear()
    first = ask(decider, "first")
    until(lambda: device.ran)
    others = [ask(decider, i) for i in range(4)]
    assert others[1].cancel()
    assert not first.cancel()  # it runs
    device.open.set()
    assert first.result(120).label == "first"
    assert [others[i].result(120).label for i in (0, 2, 3)] == [0, 2, 3]
    with pytest.raises(CancelledError):
        others[1].result(120)
    assert decider.statistics.cancelled == 1
    assert all(1 not in payloads for _, payloads in device.ran)


def test_cancelled_queries_count_in_no_plan(start):
    """Sixty-three of a batch of 64 are cancelled while the device is held: one is planned, and it runs alone."""
    device = Device()
    decider = start(device, max_waiting=64)
    device.open.clear()
    first, seen = ask(decider, "first"), []
    until(lambda: device.ran)
    policy = decider._controller.policy
    choose = policy.choose

    def watched(batches, start, rate):
        seen.append(sum(map(len, batches)))
        return choose(batches, start, rate)

    others = [ask(decider, i) for i in range(63)]
    assert all(future.cancel() for future in others[1:])
    until(lambda: decider.loop.num_tickets == 2)  # there is room for others
    policy.choose = watched
    device.open.set()
    assert (first.result(120).label, others[0].result(120).label) == ("first", 0)
    assert set(seen) <= {1}
    assert decider.statistics.cancelled == 62


@pytest.mark.parametrize("drain", [True, False])
def test_closing(start, drain):
    device = Device()
    decider = start(device)
    device.open.clear()
    futures = [ask(decider, i) for i in range(100)]
    assert decider.loop.is_running
    closing = threading.Thread(target=decider.loop.close, kwargs={"drain": drain})
    closing.start()
    until(lambda: not decider.loop.is_running)
    device.open.set()
    closing.join(20)
    assert all(future.done() for future in futures)
    ended = [future.exception() for future in futures]
    if drain:
        assert ended == [None] * 100
    else:
        assert any(isinstance(error, ClosedError) for error in ended)
    with pytest.raises(ClosedError, match="takes no more requests"):
        ask(decider, "late")
    decider.loop.close()


def test_an_answer_does_not_wait_for_what_a_batch_was_expected_to_take(start):
    """Batches are said to take minutes, and take milliseconds."""
    device = Device(scale=1e4, slower=1e-6)
    decider = start(device)
    for number in range(3):
        assert ask(decider, number, latency=1e4).result(120).label == number
    decider.loop.close()
    assert max(device.observed) < 0.01 * device.profile.batch_seconds(-20, 1)


class Held(Elastic):
    """Plans as often as it may."""

    def __init__(self, profile):
        super().__init__(profile)
        self.may, self.plans = threading.Semaphore(0), 0

    def choose(self, batches, start, rate):
        self.plans += 1
        assert self.may.acquire(timeout=10)
        return super().choose(batches, start, rate)


class Clock:
    """Stands still until it is moved."""

    def __init__(self):
        self.now, self.reads = 0.0, 0

    def __call__(self):
        now = self.now
        self.reads += 1  # last: whoever has waited for it may move the clock
        return now


def test_a_batch_ends_when_it_ends_whatever_the_planner_does():
    """A plan that takes long is no part of how long the batch took that runs beside it."""
    device, clock = Device(scale=0.1), Clock()
    policy = Held(device.profile)
    decider = QueryDecider(device, policy, max_waiting=10, device=DeviceTime(clock))
    device.open.clear()
    first = ask(decider, "first")
    until(lambda: policy.plans == 1)
    second = ask(decider, "second", latency=1000.0)
    policy.may.release()
    until(lambda: policy.plans == 2)  # while the first one runs
    reads = clock.reads
    device.open.set()
    until(lambda: clock.reads > reads)
    clock.now = 100.0
    policy.may.release()
    assert [future.result(120).compute_seconds for future in (first, second)] == device.observed == [0.0, 0.0]
    assert (first.result().in_time, second.result().queue_seconds) == (True, 100.0)
    decider.loop.close()


def test_putting_queries_into_batches_counts_as_planning(monkeypatch):
    device, clock, submit = Device(scale=0.1), Clock(), Controller.submit

    def takes_a_second(self, query):
        clock.now += 1.0
        submit(self, query)

    monkeypatch.setattr(Controller, "submit", takes_a_second)
    decider = QueryDecider(device, Elastic(device.profile), max_waiting=10, device=DeviceTime(clock))
    assert ask(decider, "one", latency=1000.0).result(120).label == "one"
    assert decider.statistics.planning_seconds == 1.0
    decider.loop.close()


def test_a_callback_holds_nothing_up_and_harms_nobody(start, caplog):
    device, release, called = Device(), threading.Event(), []
    decider = start(device)

    def slow(future):
        assert release.wait(10)

    def fails(future):
        called.append(future)
        raise SystemExit

    device.open.clear()
    ask(decider, "slow").add_done_callback(slow)
    device.open.set()
    first = ask(decider, "fails")
    first.add_done_callback(fails)
    until(lambda: not decider.loop.num_tickets)  # while the first callback still runs
    release.set()
    assert ask(decider, "next").result(120).label == "next"
    until(lambda: "A callback of request 1 has failed" in caplog.text)  # answers do not wait for callbacks
    assert called == [first]


def test_a_callback_may_close(start):
    decider = start(Device())
    closed = threading.Event()

    def close(future):
        decider.loop.close()
        closed.set()

    ask(decider, "image").add_done_callback(close)
    assert closed.wait(10)
    decider.loop.close()


class Broken(FixedLevel):
    """Cannot plan for the first query."""

    def choose(self, batches, start, rate):
        if batches[0].queries[0].id == 0:
            raise AssertionError("a mistake")
        return super().choose(batches, start, rate)


def test_a_mistake_of_the_policy_ends_what_waits_and_no_more(start, caplog):
    decider = start(Device(), lambda profile: Broken(profile, 0))
    with pytest.raises(FailedError, match="the policy has failed at the queries that waited: AssertionError"):
        ask(decider, "image").result(120)
    assert "The policy has failed" in caplog.text
    assert ask(decider, "image").result(120).label == "image"
    assert (decider.statistics.failed, decider.statistics.answered, decider.loop.num_tickets) == (1, 1, 0)


def test_a_task_that_the_profile_has_not_is_refused(start):
    decider = start(Device())
    with pytest.raises(ProfileError, match="task 'imagenet' is being registered, or the policy cannot serve it"):
        ask(decider, "image", task="imagenet")
    assert ask(decider, "image").result(120).label == "image"


def test_what_cannot_be_observed_harms_nobody(start, caplog):
    device = Device()

    def fail(level, count, seconds):
        raise ValueError("a mistake")

    device.observe = fail
    decider = start(device)
    for number in range(2):
        assert ask(decider, number).result(120).label == number
    decider.loop.close()
    assert "What a batch took could not be taken in" in caplog.text


def test_a_mistake_of_the_thread_ends_all(start, caplog):
    device = Device()

    def leave(level, count, seconds):
        raise SystemExit

    device.observe = leave
    decider = start(device)
    assert decider.loop.is_running
    assert ask(decider, "image").result(120).label == "image"
    decider.loop.close()
    assert "has died" in caplog.text
    assert not decider.loop.is_running
    with pytest.raises(DiedError, match=r"This service has died of SystemExit"):
        ask(decider, "image")


# On a service


@pytest.fixture
def serving(vit, registered, options):
    with Service.from_checkpoint(vit, repository=registered, **options) as found:
        found.measure_latency()
        yield found


def test_every_program_runs_once_before_queries_are_served(serving, monkeypatch):
    ran, rehearse = [], serving._catalogue.programs.rehearse

    def spy(level, images):
        ran.append((level, len(images)))
        return rehearse(level, images)

    monkeypatch.setattr(serving._catalogue.programs, "rehearse", spy)
    serving.start()
    assert sorted(ran) == [(level, size) for level in serving.levels for size in serving.batch_sizes]
    serving.start()
    assert serving.submit(stripes(1).images[0], "stripes", deadline=30.0).result(30).in_time
    assert len(ran) == len(serving.levels) * len(serving.batch_sizes)


def test_programs_leave_with_a_service(vit, registered, options):
    """Without waiting for the garbage collector: some hundred programs are all that a process has room for."""
    service = Service.from_checkpoint(vit, repository=registered, **options)
    programs = weakref.ref(service._catalogue.programs)
    service.measure_latency()
    gc.disable()
    try:
        with service:
            service.submit(stripes(1).images[0], "stripes", deadline=30.0).result(30)
        assert programs() is None
    finally:
        gc.enable()
    assert service.stats().answered == 1
    with pytest.raises(ClosedError, match="This service is closed"):
        service.classify(stripes(3).images, "stripes")


def test_a_service_answers_queries(serving):
    dataset = stripes(40, seed=12)
    futures = [serving.submit(image, "stripes", deadline=30.0) for image in dataset.images]
    answers = [future.result(30) for future in futures]
    right = [a.label == dataset.names[label] for a, label in zip(answers, dataset.labels, strict=True)]
    assert np.mean(right) > 0.8
    for image, answer in zip(dataset.images, answers, strict=True):
        (alone,) = serving.classify(image, "stripes", answer.level)
        np.testing.assert_allclose(answer.probabilities, alone.probabilities, atol=1e-6)
    assert serving.stats().answered == 40

    async def ask_all():
        return await asyncio.gather(*(serving.submit(image, "stripes", deadline=30.0) for image in dataset.images[:5]))

    assert [answer.label for answer in asyncio.run(ask_all())] == [a.label for a in answers[:5]]


def test_drift_while_the_profile_is_incomplete(serving, monkeypatch):
    """As while a task is being registered: the decider goes on by what it has."""
    image = stripes(1).images[0]
    serving.submit(image, "stripes", deadline=30.0).result(30)
    known = serving.latency.seconds(0, 1).p50

    def incomplete():
        raise ProfileError("not timed yet")

    monkeypatch.setattr(serving._registrar, "ready_profile", incomplete)
    refreshed = serving.latency.refreshed
    for _ in range(NEWEST):
        serving._planning.decider._runner.observe(0, 1, 50 * known)
    assert serving.latency.refreshed > refreshed
    assert serving.submit(image, "stripes", deadline=30.0).result(30).label


@pytest.fixture
def two(vit, registered, options, tmp_path):
    """How to open a repository of one's own, with room for a second task."""

    def opened(**changed):
        folder = tmp_path / "tasks"
        if not folder.exists():
            shutil.copytree(registered, folder)
        services.append(Service.from_checkpoint(vit, repository=folder, **options, **changed))
        services[-1].measure_latency()
        return services[-1]

    services = []
    yield opened
    for service in services:
        service.close(drain=False)


def test_labels_are_those_of_the_version_that_ran(two, monkeypatch):
    """A version whose classes are in another order comes while a batch runs."""
    service, release, images = two(), threading.Event(), stripes(30, seed=12)
    collect, held = LevelRunner.collect, threading.Event()

    def slow(self, *batch):
        held.set()
        assert release.wait(60)
        return collect(self, *batch)

    image = images.images[0]
    (wanted,) = service.classify(image, "stripes", 0)
    monkeypatch.setattr(LevelRunner, "collect", slow)
    monkeypatch.setattr(QueryDecider, "use", lambda self, profile: None)  # which may be for another level
    answer = service.submit(image, "stripes", deadline=120.0)
    assert held.wait(30)
    version = dataclasses.replace(service.task("stripes"), labels=("columns", "rows"), version=2)
    service._catalogue.programs.put(version)
    service._registrar._tasks = {"stripes": version}
    release.set()
    assert answer.result(30).label == wanted.label


def test_queries_do_not_wait_for_a_task_that_is_trained(two):
    service, ended = two(), []

    def meanwhile(what, done, total):
        if what == "fitting the head" and not ended:
            thread = threading.Thread(target=serve)
            thread.start()
            ended.append(thread.join(30) or not thread.is_alive())

    def serve():
        service.start()
        assert service.submit(stripes(1).images[0], "stripes", deadline=30.0).result(30).label
        service.close()

    service.register_task("other", stripes(40), training=TrainingConfig(steps=1), progress=meanwhile)
    assert ended == [True]
    assert service.stats().answered == 1


def test_a_task_that_the_policy_cannot_serve_is_refused_before_it_is_kept(two, caplog):
    """It has no prompts, and the policy no other level; then batches drift."""
    service, image = two(policy=lambda profile: FixedLevel(profile, 2)), stripes(1).images[0]
    assert service.submit(image, "stripes", deadline=30.0).result(30).level == 2
    with pytest.raises(ValueError, match="level 2 is not in the profile, which has -4, 0"):
        service.register_task("plain", stripes(40), training=TrainingConfig(steps=1))
    assert service.tasks.keys() == {"stripes"}
    known, refreshed = service.latency.seconds(2, 1).p50, service.latency.refreshed
    for _ in range(NEWEST):
        service._planning.decider._runner.observe(2, 1, 50 * known)
    assert service.latency.refreshed > refreshed
    assert service.submit(image, "stripes", deadline=300.0).result(30).level == 2
    service.close()
    again = two()
    assert again.tasks.keys() == {"stripes"}
    assert again.register_task("plain", stripes(40), training=TrainingConfig(steps=1)).version == 1
    assert "Queries run no more at the levels 2: task 'plain' has no such prompts." in caplog.text


def test_a_service_that_was_closed_does_not_start(two):
    service = two()
    assert service.is_running
    service.close()
    assert not service.is_running
    with pytest.raises(ClosedError, match="This service is closed"):
        service.submit(stripes(1).images[0], "stripes", deadline=30.0)


def test_a_task_is_served_once_it_is_registered(vit, options, tmp_path, monkeypatch):
    with Service.from_checkpoint(vit, repository=tmp_path, **options) as service:
        service.register_task("first", stripes(40), training=TrainingConfig(steps=1))
        image, measure = stripes(1).images[0], service._catalogue.measure
        service.submit(image, "first", deadline=30.0).result(30)
        refused = []

        def meanwhile(*given, **options):
            with pytest.raises(UnknownTaskError, match="no task 'second'; registered: first") as error:
                service.submit(image, "second", deadline=30.0)
            refused.append(error)
            return measure(*given, **options)

        monkeypatch.setattr(service._catalogue, "measure", meanwhile)
        service.register_task("second", stripes(40, seed=1), training=TrainingConfig(steps=1))
        assert len(refused) == 1
        for task in ("first", "second"):
            assert service.submit(image, task, deadline=30.0).result(30).label


def test_bad_queries(serving):
    image = stripes(1).images[0]
    with pytest.raises(UnknownTaskError, match="no task 'faces'"):
        serving.submit(image, "faces", deadline=1.0)
    with pytest.raises(InvalidImageError, match="images must be uint8"):
        serving.submit(image.astype(float), "stripes", deadline=1.0)
    with pytest.raises(ElasticError, match="a query must be a single image, got 2"):
        serving.submit(stripes(2).images, "stripes", deadline=1.0)
    with pytest.raises(ShedError):
        serving.submit(image, "stripes", deadline=0.0).result(120)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(["image", "task", "deadline", "utility"]), value=JSON)
def test_any_value_is_taken_or_refused_by_name(serving, field, value):
    query = {"image": stripes(1).images[0], "task": "stripes", "deadline": 30.0, "utility": 1.0} | {field: value}
    try:
        future = serving.submit(**query)
    except ValueError as error:
        assert field in str(error)  # noqa: PT017
        return
    assert field in ("deadline", "utility")
    assert type(value) in (int, float)
    with contextlib.suppress(ShedError, OverloadedError):  # where the deadline is near
        assert future.result(30).label


def test_an_image_that_changes_after_it_was_given_changes_nothing(serving, monkeypatch):
    image, waiting = stripes(1).images[0], []
    serving.start()
    monkeypatch.setattr(QueryDecider, "serve", lambda self, task, payload, **_: waiting.append(payload))
    serving.submit(image, "stripes", deadline=30.0)
    np.testing.assert_array_equal(waiting[0], image)
    assert not np.shares_memory(waiting[0], image)
