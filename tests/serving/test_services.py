"""Language models, experts, elastic tokens: whatever they meet, each request ends once, and nothing stays."""

import contextlib
import gc
import logging
import signal
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import InvalidStateError, wait

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from jaxinfer import SamplingParams
from jaxinfer.elastic import Service
from jaxinfer.elastic.decider import QueryDecider
from jaxinfer.elastic.programs import LevelPrograms
from jaxinfer.elastic.runner import LevelRunner
from jaxinfer.elastic.scheduling.policies import Elastic
from jaxinfer.experts import System
from jaxinfer.experts.execution.architectures import ArchitecturePrograms
from jaxinfer.generation.api.build import build_engine
from jaxinfer.generation.engine.decider import RequestDecider
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.generation.execution.plan import Plan
from jaxinfer.models.files.loading import load_model
from jaxinfer.serving import ClosedError, OverloadedError, ServingError
from tests.elastic.vits import stripes
from tests.experts.boards import AnyProfiles, config, image
from tests.generation.conftest import SMALL_CONFIG, SMALL_PAGES

LIMIT = 3
"""Requests that are taken at a time; experts queue as many at each executor."""
PATIENCE = 60


class InjectedError(Exception):
    """What a device raises."""


class Faults:
    """Has what runs on devices fail the next time."""

    def __init__(self):
        self.armed = False

    def before(self, method):
        def maybe(*args, **options):
            if self.armed:
                self.armed = False
                raise InjectedError
            return method(*args, **options)

        return maybe


class Generating:
    """An engine: requests have no deadlines."""

    def __init__(self, engine):
        self.loop = RequestDecider(engine, max_requests=LIMIT).loop
        self._engine = engine

    def ask(self, number, urgent):
        params = SamplingParams(max_tokens=1 + number % 5, ignore_eos=True)
        pending = RequestTicket(self._engine.prepare([97 + number % 8] * (1 + number), params).sequences(), owner=self)
        self.loop.submit(pending)
        return pending.future

    def check(self):
        self._engine.scheduler.check_integrity()
        assert not self._engine.scheduler.sequences


class Judging:
    """Two experts, of which one has room."""

    def __init__(self, board):
        system = config(board, ["c0", "c1"], slots=1, host=1, max_waiting=LIMIT)
        self._system = System(system, profiles=AnyProfiles())
        self.loop = self._system._decider.loop

    def ask(self, number, urgent):
        return self._system.submit(f"c{number % 2}", image(number), deadline=1e-3 if urgent else None)

    def check(self):
        assert not self._system.scheduler.queued


class Classifying:
    """A task at some levels."""

    def __init__(self, service):
        runner, policy = (
            LevelRunner(service._catalogue.programs, service.latency, lambda: None),
            Elastic(service.serving_profile()),
        )
        self._decider = QueryDecider(runner, policy, max_waiting=LIMIT)
        self.loop = self._decider.loop

    def ask(self, number, urgent):
        picture = stripes(1, seed=number).images[0]
        return self._decider.serve("stripes", picture, latency=1e-6 if urgent else 60.0, utility=1.0, owner=self)

    def check(self):
        assert not self._decider._unplanned


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("jaxinfer")}


class Machine(RuleBasedStateMachine):
    """What callers do to a service, and what its device does."""

    def __init__(self, start, faults):
        super().__init__()
        self.threads = threads()
        self.service, self.faults = start(), faults
        self.loop, self.futures, self.ends, self.drained = self.service.loop, [], Counter(), None
        self.asked = 0  # what is asked next must not depend on the time that anything takes

    @rule(number=st.integers(0, 20), urgent=st.booleans())
    def ask(self, number, urgent):
        self.asked += 1
        try:
            future = self.service.ask(number, urgent)
        except OverloadedError as error:
            assert self.drained is None
            assert error.retry_after is None or error.retry_after >= 0  # noqa: PT017
        except ClosedError:
            assert self.drained is not None
        else:
            assert self.drained is None
            self.futures.append(future)
            future.add_done_callback(lambda future: self.ends.update([id(future)]))

    @rule(urgent=st.booleans())
    def flood(self, urgent):
        for number in range(2 * LIMIT):
            self.ask(number, urgent)

    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        if self.futures:
            self.futures[which % len(self.futures)].cancel()

    @rule(which=st.integers(0, 100))
    def resolve(self, which):
        """As a caller does that has a deadline of its own."""
        if self.futures:
            with contextlib.suppress(InvalidStateError):
                self.futures[which % len(self.futures)].set_result(None)

    @rule()
    def fail(self):
        self.faults.armed = True

    @rule(seconds=st.sampled_from([1e-4, 5e-3]))
    def pause(self, seconds):
        time.sleep(seconds)

    @rule()
    def finish(self):
        assert not wait(self.futures, PATIENCE).not_done

    @precondition(lambda self: self.asked > LIMIT and self.drained is None)
    @rule(drain=st.booleans(), timeout=st.sampled_from([None, PATIENCE]))
    def close(self, drain, timeout):
        self.drained = drain
        self.loop.close(drain=drain, timeout=timeout)

    def teardown(self):
        self.faults.armed = False
        self.loop.close(drain=self.drained is None, timeout=5)
        assert not wait(self.futures, 0).not_done
        give_up = time.monotonic() + PATIENCE
        while threads() != self.threads:  # those that read files are not waited for: a disk may hang
            assert time.monotonic() < give_up
            time.sleep(1e-3)
        assert all(self.ends[id(future)] == 1 for future in self.futures)
        counted = self.loop.statistics
        assert counted.answered + counted.failed + counted.cancelled + counted.shed == len(self.futures)
        assert all(self.may_end_by(None if x.cancelled() else x.exception()) for x in self.futures)
        assert self.loop.num_tickets == 0
        self.service.check()
        left = [*map(weakref.ref, self.futures)]
        self.futures.clear()
        gc.collect()
        assert not [future for future in left if future() is not None]

    def may_end_by(self, error):
        if isinstance(error, ClosedError):
            return self.drained is False
        return error is None or isinstance(error, ServingError | InjectedError)


@pytest.fixture
def faults():
    logging.disable()  # what is logged, pytest keeps, and with an error its frames
    yield Faults()
    logging.disable(logging.NOTSET)


def under_signals(start):
    """Ask and cancel while Ctrl-C comes, anywhere; then there is an answer, and room."""
    before, service = threads(), start()
    for number in range(100):
        timer, futures = threading.Timer(1e-3 * (number % 10), signal.raise_signal, [signal.SIGINT]), []
        with contextlib.suppress(KeyboardInterrupt):
            timer.start()
            while True:
                with contextlib.suppress(OverloadedError):
                    futures.append(service.ask(number % 8, urgent=False))
                    futures[len(futures) // 2].cancel()
        wait(futures, PATIENCE)
    give_up = time.monotonic() + PATIENCE
    while service.loop.num_tickets:
        assert time.monotonic() < give_up
        service.loop.wake()
        time.sleep(1e-3)
    assert service.ask(1, urgent=False).result(PATIENCE) is not None
    service.loop.close()
    while threads() != before:  # the machine counts its own
        assert time.monotonic() < give_up
        time.sleep(1e-3)


def run(start, faults):
    under_signals(start)
    run_state_machine_as_test(
        lambda: Machine(start, faults),
        settings=settings(
            max_examples=4,
            stateful_step_count=20,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.slow
def test_language_models(model_dir, faults, monkeypatch):
    model = load_model(model_dir)
    plan = Plan.of_model(model, SMALL_CONFIG, num_pages=SMALL_PAGES)
    engine = build_engine(model, None, SMALL_CONFIG, plan)
    engine.compile_ahead()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "close", lambda: None)  # each example has an engine of its own to a caller
        patched.setattr(engine.executor, "launch", faults.before(engine.executor.launch))
        run(lambda: Generating(engine), faults)
    engine.close()


@pytest.mark.slow
def test_experts(board, faults, monkeypatch):
    monkeypatch.setattr(ArchitecturePrograms, "run", faults.before(ArchitecturePrograms.run))
    run(lambda: Judging(board), faults)


@pytest.mark.slow
def test_elastic_tokens(vit, registered, service_options, faults, monkeypatch):
    with Service.from_checkpoint(vit, repository=registered, **service_options) as service:
        service.measure_latency()
        monkeypatch.setattr(LevelPrograms, "launch", faults.before(LevelPrograms.launch))
        run(lambda: Classifying(service), faults)
