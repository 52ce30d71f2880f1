"""The engine: requests in, tokens out, one step at a time."""

import contextlib
import inspect
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Ordered
from typing import Any

from jaxinfer.compiled import Clock, Origin
from jaxinfer.compiled.background import StoppedError
from jaxinfer.compiled.costs import SAVE_SECONDS
from jaxinfer.generation.engine.batch import Batch, Failure, StepOutput
from jaxinfer.generation.engine.config import EngineConfig, SharedConfig
from jaxinfer.generation.engine.input import InputProcessor
from jaxinfer.generation.engine.output import OutputProcessor
from jaxinfer.generation.engine.page_tier import PageTier
from jaxinfer.generation.engine.protocols import Executor, InFlightStep, Scheduler
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.restoring import Restoring, await_pages, store_pages
from jaxinfer.generation.engine.stats import EngineStats
from jaxinfer.generation.lora.cache import AdapterCache
from jaxinfer.generation.params import PoolingParams, SamplingParams
from jaxinfer.serving.errors import closed_error
from jaxinfer.text import Prompt

log = logging.getLogger(__name__)


class Engine:
    """Runs requests together on one model; a request may come or go between any two steps.

    `build_engine` (api/build.py) makes one from a loaded model.

    If a call ends early (Ctrl-C, a bug of ours), records or device state may be half-changed. The next call notices
    (`_Change`) and starts over: nothing is cached or in flight, and unfinished requests are computed again from the
    tokens that the host has.

    Args:
      config: the engine's sizes.
      inputs: makes requests from prompts.
      scheduler: decides what every step runs.
      executor: runs it on the device.
      restoring: moves pages of each lane's prefix cache to a tier and back; none: they are forgotten.
      clock: the time of sequences, real or virtual.
      asleep: whether nothing is on the device before `wake_up`.
    """

    def __init__(
        self,
        config: SharedConfig,
        inputs: InputProcessor,
        scheduler: Scheduler,
        executor: Executor,
        *,
        restoring: Ordered[Restoring] = (),
        clock: Clock = time.perf_counter,
        asleep: bool = False,
    ):
        self._config = config
        self.inputs, self.scheduler, self._restoring = inputs, scheduler, restoring
        self._executor: Executor | None = executor
        self._outputs = OutputProcessor(clock)
        self._lock = threading.RLock()  # held by steps and by `close`
        self._closed = False
        self._asleep = asleep
        self._in_flight: deque[InFlightStep] = deque()
        self._advanced: list[Sequence] = []  # by this step, or by an interrupted one
        self._interrupted = False  # a call was cut short, or is running now
        self._failed_steps = 0  # since the last committed one
        self._run_lock = threading.Lock()
        self._current_run: Callable[[], Generator | None] = lambda: None
        self._run_ids: list[str] = []  # the requests of the current run
        self._origin = Origin("This model")

    @property
    def config(self) -> SharedConfig:
        """The engine's sizes, which cannot be changed."""
        return self._config

    @property
    def adapters(self) -> AdapterCache | None:
        """The registry of LoRA adapters; None for an engine without room for them."""
        return self.inputs.adapters

    @property
    def page_tier(self) -> PageTier | None:
        """The tier that keeps pages of the prefix cache which the devices forget; None: there is none."""
        return self._restoring[0].tier if self._restoring else None

    @property
    def executor(self) -> Executor:
        """The device side. Raises ClosedError after `close`."""
        if self._executor is None:
            raise closed_error("This model")
        return self._executor

    def stats(self) -> EngineStats:
        """Return what the engine holds, and has done so far; from any thread."""
        load, counters, executor = self.scheduler.load, vars(self._outputs.counters), self.executor
        counted = {**counters, "ended": dict(counters["ended"])}
        tiers = {} if self.page_tier is None else self.page_tier.stats
        return EngineStats(
            **load._asdict(),
            **counted,
            compile_misses=executor.programs.misses,
            cpu_kernels=executor.programs.cpu_kernels,
            pipeline=executor.report().pipeline,
            host_kv=tiers.get("host_kv"),
            disk_kv=tiers.get("disk_kv"),
        )

    # Requests

    def prepare(
        self,
        prompt: Prompt | Request,
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Request:
        """Check a prompt and make a request, not yet queued; in any thread. A prepared request stays as it is.

        Args:
          params: the prompt's params; None: the model's defaults. A prepared request has its own.
          request_id: the caller's own name for the request; None: a new one; a prepared request has its own.

        Raises ValueError for a request that this engine could never run, or that another engine has prepared;
        RuntimeError in a forked process.
        """
        if isinstance(prompt, Request):
            if params is not None or request_id is not None:
                raise ValueError("A prepared request already has its params and request_id; do not give them again.")
            self.inputs.check_own(prompt)
            return prompt
        self._origin.check()
        request = self.inputs.process(prompt, params, request_id)
        self.scheduler.check(request)
        return self.inputs.with_grammar(request)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the sequences of a request (`Request.sequences`)."""
        with self._lock, _Change(self):
            for sequence in sequences:
                self._outputs.arrive(sequence)
                self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Give up a request; its pages are free at once."""
        with self._lock, _Change(self):
            for sequence in self.scheduler.remove(request_id):
                if not sequence.finished:
                    self._outputs.abort(sequence)
                    self._advanced.append(sequence)

    # Steps

    def step(self, max_passes: int | None = None) -> list[Sequence]:
        """Launch the next step and collect the one before; returns the sequences that have advanced.

        `max_passes` bounds the passes through the model in the step, and so the tokens of each sequence, speculative
        ones aside. Raises ClosedError once the engine is closed.
        """
        with self._lock, _Change(self):
            try:
                self._step(max_passes)
            except Exception as error:  # in the scheduler: no single sequence is to blame
                self._recover_scheduler(error)
            if self._closed:  # by another thread, which may have cut the step short
                raise closed_error("This model")
        return self._take_advanced()

    def _step(self, max_passes: int | None) -> None:
        if self._asleep:  # requests may be given up meanwhile
            return
        depth = 0 if self.scheduler.needs_host_sync else self.executor.depth
        self._collect(depth)
        batch = self.scheduler.schedule(max_passes)
        self._fail(batch.failures)
        if batch:
            self._launch(batch)
        elif not self._in_flight:
            await_pages(self._restoring)
        self._collect(depth if batch else 0)

    def _fail(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            self._outputs.fail(failure.sequence, failure.message)
            self._advanced.append(failure.sequence)

    def _launch(self, batch: Batch) -> None:
        try:
            self._in_flight.append(self.executor.launch(batch))
        except Exception as error:
            self._recover(batch.sequences, error)

    def _collect(self, depth: int) -> None:
        """Collect steps and commit their results, until at most `depth` are in flight."""
        while len(self._in_flight) > depth:
            step = self._in_flight[0]  # stays there if an interrupt ends the wait
            try:
                output = self.executor.collect(step)
            except Exception as error:
                self._recover(step.batch.sequences, error)
            else:
                self._in_flight.popleft()
                self._commit(step.batch, output)

    def _commit(self, batch: Batch, output: StepOutput) -> None:
        """Give a step's results to its sequences, and release those that have finished."""
        self._advanced += batch.sequences
        self._outputs.process(batch, output)
        self.scheduler.commit(batch, output)
        self._failed_steps = 0

    def _recover(self, sequences: list[Sequence], error: Exception) -> None:
        """End the sequences of a step that failed; all others begin again from the tokens that the host has."""
        log.error("A step failed; its %d sequences end with an error.", len(sequences), exc_info=error)
        self._fail(Failure(s, f"{type(error).__name__}: {error}") for s in sequences if not s.finished)
        self._reset()

    def _recover_scheduler(self, error: Exception) -> None:
        """Recover from a failure of the scheduler: all begin again; if that fails too, all end with the error."""
        self._failed_steps += 1
        if self._failed_steps > 1:
            self._recover(self.scheduler.sequences, error)
            return
        log.error("Scheduling failed; all requests begin again.", exc_info=error)
        self._reset()

    def _reset(self) -> None:
        """Reset records and device state, whatever state they are in; sequences keep their tokens."""
        if (sequence := self._outputs.take_unfinished()) is not None:
            self._fail([Failure(sequence, "It was interrupted while results were given to it.")])
        self._await_devices()
        self.scheduler.restart()
        if self._asleep:
            self.executor.free_state()
        else:
            self.executor.restart()

    def _take_advanced(self) -> list[Sequence]:
        advanced, self._advanced = self._advanced, []
        return advanced

    def drain(self, is_wanted: Callable[[], bool] = lambda: False) -> list[Sequence]:
        """Wait for the steps in flight, and save costs and pages; returns the sequences that have advanced.

        is_wanted: whether requests wait, so that saving pages ends early.
        """
        with self._lock, _Change(self):
            if self._closed:
                return self._take_advanced()
            self._collect(0)
            try:
                if not self._asleep:
                    store_pages(self._restoring, self.executor.read_pages, is_wanted)
            except Exception as error:
                log.error("Pages of the KV cache could not be saved; nothing is cached now.", exc_info=error)
                self._reset()
            costs = self.executor.costs
        costs.save(every=SAVE_SECONDS)
        return self._take_advanced()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the engine's."""
        return self._origin.forked

    def interrupt(self) -> None:
        """End a step that waits for a disk; from any thread, when no other step is to follow."""
        if (executor := self._executor) is not None:
            executor.interrupt()

    def close(self, *, timeout: float | None = None) -> None:
        """Release the device state and the weights; from any thread, also repeatedly.

        A running step ends first, for which this waits at most `timeout` seconds, and then what is on the devices; the
        next step of any run raises ClosedError.
        """
        if self._origin.forked:
            return
        self._closed = True
        self.interrupt()
        if self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            try:
                self._await_devices()
                if self._executor is not None and self.page_tier is not None:
                    self.page_tier.close()
                self._executor = None
                for pool in self.scheduler.pools:  # so that nobody takes prompts for cached
                    pool.clear()
            finally:
                self._lock.release()

    def _await_devices(self) -> None:
        """Wait for the steps in flight, whose results nobody wants: a process that ended meanwhile would abort."""
        while self._in_flight:
            with contextlib.suppress(Exception):  # of the step
                self.executor.wait(self._in_flight[0])
            self._in_flight.popleft()

    # Sleep

    def sleep(self) -> None:
        """Free the weights on the devices. No step may be in flight.

        Requests that have begun go on after `wake_up`.
        """
        with self._lock, _Change(self):
            if self._in_flight:
                self._await_devices()
                self.scheduler.restart()
            self._asleep = True
            self.executor.sleep()

    def free_state(self) -> None:
        """Free the state on the devices, after `sleep`; no prompt stays cached.

        Requests that have begun are computed again after `wake_up`, from the tokens that the host has.
        """
        with self._lock, _Change(self):
            self.scheduler.restart()
            self.executor.free_state()

    def cache_seconds(self, *, on_host: bool = False) -> float:
        """The seconds to compute the cached tokens again, as far as they are expected to be needed.

        All those of requests that have begun are needed. Of others it is the share of prompts that was in the cache.

        on_host: the pages that the host keeps, in place of those of the devices.
        """
        chunk, config, pools = self.executor.chunk_seconds, self._config, self.scheduler.pools
        if chunk is None or not isinstance(config, EngineConfig):
            return 0.0
        stats = self.stats()
        kept = 0 if stats.host_kv is None else stats.host_kv.pages
        cached = kept if on_host else sum(pool.cached for pool in pools)
        used = 0 if on_host else sum(pool.count - pool.free for pool in pools)
        return (used + stats.cache_hit_rate * cached) * config.page_size / config.chunk_size * chunk

    def wake_up(self, leaves: list[Any]) -> None:
        """Go on after `sleep`, with these weights, in the order in which programs take them. Raises ClosedError."""
        with self._lock, _Change(self):
            self.executor.wake_up(leaves)
            self._asleep = False

    # Programs

    def compile_ahead(self) -> int:
        """Compile every program that any request can need; returns how many were missing."""
        return self.executor.compile_ahead()

    def compile_for(self, sequences: list[Sequence]) -> None:
        """Compile what these sequences can need together. Raises MemoryError, MappingsError, ClosedError."""
        with self._lock:
            executor = self.executor
            try:
                if sequences:
                    executor.compile_ahead(sequences)
            except StoppedError:
                raise closed_error("This model") from None

    def compile_in_background(self) -> None:
        """Compile everything else that any request can need; a request that needs it sooner goes first."""
        self.executor.compile_in_background()

    # Whole requests

    def run(
        self, groups: list[list[Sequence]], max_passes: int | None = None, *, compiled: bool = False
    ) -> Iterator[list[Sequence]]:
        """Queue sequences, a list for each request, and step until all have ended.

        Yields the sequences that each step has advanced. Closing the iterator gives the requests up.

        Args:
          max_passes: as in `step`.
          compiled: whether the programs for the requests have been compiled ahead.

        Raises RuntimeError in a forked process, and when read while another run has begun and not ended, since each
        would take the other's sequences for its own.
        """
        self._origin.check()
        me: list[weakref.ref[Generator]] = []
        run = self._run([s for group in groups for s in group], max_passes, compiled, me)
        me.append(weakref.ref(run))
        return run

    def _run(
        self, sequences: list[Sequence], max_passes: int | None, compiled: bool, me: list[weakref.ref[Generator]]
    ) -> Generator[list[Sequence], None, None]:
        self._become_current(me[0])
        self.compile_for([] if compiled else sequences)
        try:
            self._abort_run()  # the previous run, if its end was interrupted
            self._run_ids = list(dict.fromkeys(s.request_id for s in sequences))
            self.add(sequences)
            unfinished = set(sequences)
            while unfinished:
                advanced = [s for s in self.step(max_passes) if s in unfinished]
                unfinished.difference_update(s for s in advanced if s.finished)
                yield advanced
        finally:
            if not self._origin.forked:  # in a forked process locks may be held for ever
                self._abort_run()
                self.drain()

    def _become_current(self, me: weakref.ref[Generator]) -> None:
        """Make a run that begins the only one.

        A run counts until its generator ends: unlike a lock's release, an interrupt cannot prevent that. A generator
        that has not begun does not count: if `run` itself is interrupted, the error's traceback keeps it alive.
        """
        with self._run_lock:
            current = self._current_run()
            if current is not None and inspect.getgeneratorstate(current) != inspect.GEN_CLOSED:
                raise RuntimeError(
                    "This model runs other requests, in another thread or for a stream that was not read to its end: "
                    "close that stream, or use AsyncLLM, which runs the requests of many threads together."
                )
            self._current_run = me

    def _abort_run(self) -> None:
        for request_id in self._run_ids:
            self.abort(request_id)
        self._run_ids = []


class _Change:
    """Marks an engine as changing. The mark stays if the change is cut short; then the next change starts over."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __enter__(self) -> None:
        if self._engine._interrupted and not self._engine._closed:
            self._engine._reset()
        self._engine._interrupted = True

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._engine._interrupted = error is not None
