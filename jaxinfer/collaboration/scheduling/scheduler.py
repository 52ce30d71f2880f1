"""CoServe's scheduler: which executor gets a request, what it runs next, and which experts are in its memory.

It has no thread and no clock. Whoever drives it (the simulator, or real executors) tells it what has happened
(`submit`, `loaded`, `executed`), asks what may begin now (`poll`), and has that done.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxinfer.collaboration.errors import (
    CollaborationError,
    DeadlineExceededError,
    ExecutorDiedError,
    InsufficientMemoryError,
    LoadError,
    OverloadedError,
)
from jaxinfer.collaboration.scheduling.assignment import assign
from jaxinfer.collaboration.scheduling.executor_state import ExecutorConfig, ExecutorState
from jaxinfer.collaboration.scheduling.expert_manager import ExpertManager
from jaxinfer.collaboration.scheduling.experts import ExpertGraph, ExpertInfo
from jaxinfer.collaboration.scheduling.policy import Policy
from jaxinfer.collaboration.scheduling.profile import Profile, Profiles
from jaxinfer.collaboration.scheduling.queue import Group
from jaxinfer.collaboration.scheduling.request import Action, Batch, Failure, Load, Request

MAX_PADDING = 0.25
FIRST_BACK_OFF = 1.0
"""Seconds before an expert that could not be loaded is tried again; each further failure doubles them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """Why a request went where it went; times in seconds, by executor.

    Attributes:
      totals: until each had done what it had.
      additions: what the request would have added; None: it could not go there.
      executor: the choice.
    """

    request: Request
    totals: Sequence[float]
    additions: Sequence[float | None]
    executor: int


@dataclasses.dataclass
class _Quarantine:
    until: float
    back_off: float
    reason: str


class Scheduler:
    """Decides for all executors of a system.

    Args:
      graph: the experts.
      profiles: what they cost.
      executors: in the order of their indices, accelerators first.
      policy: which rules are followed.
      host_bytes: of the host cache, if the policy has one.
      max_queued: requests beyond so many that wait are refused.
      on_decision: told of every assignment.

    Attributes:
      manager: which experts are in which memory.
      executors: their states.
      statistics: what has been done.

    Raises ConfigError or ProfileError if there is an expert that can never run.
    """

    def __init__(
        self,
        graph: ExpertGraph,
        profiles: Profiles,
        executors: Iterable[ExecutorConfig],
        policy: Policy,
        *,
        host_bytes: int = 0,
        max_queued: int | None = None,
        on_decision: Callable[[Decision], None] | None = None,
    ):
        self.graph, self.profiles, self.policy = graph, profiles, policy
        self.manager = ExpertManager(graph, profiles, executors, policy, host_bytes=host_bytes)
        self.executors, self.statistics = self.manager.executors, self.manager.statistics
        self._max_queued, self._on_decision = max_queued, on_decision
        self._quarantined: dict[str, _Quarantine] = {}
        self._turn = 0
        self._settled = False  # whether nothing can begin before something happens

    # -- what has happened --

    def submit(self, request: Request, now: float) -> int:
        """Assign a request; returns the executor's index.

        Raises RoutingError, OverloadedError (for an input's first stage), LoadError while its expert is in quarantine.
        """
        expert = self.graph.require(request.expert)
        if self._max_queued is not None and request.stage == 0 and self.queued >= self._max_queued:
            wait = min((x.total(now) for x in self.executors if x.alive), default=0.0)
            raise OverloadedError(
                f"{self.queued} requests wait, the limit is {self._max_queued}; try again in {wait:.1f} s.", wait
            )
        self._require_loadable(expert.name, now)
        return self._assign(request, expert, now)

    def loaded(self, load: Load, now: float, error: Exception | None = None) -> list[Failure]:
        """A load has ended; returns the requests that its error ends."""
        self._settled = False
        self.manager.end_load(load, loaded=error is None)
        if error is None:
            self._quarantined.pop(load.expert, None)
            return []
        return self._quarantine(load.expert, error, now)

    def executed(self, batch: Batch, now: float, error: Exception | None = None) -> list[Failure]:
        """A batch has ended; returns the requests that its error ends. What follows them is submitted anew."""
        executor = self.executors[batch.executor]
        self._end_batch(executor)
        if error is not None:
            return self._fail(batch.requests, error)
        self.statistics.batches += 1
        self.statistics.requests += len(batch.requests)
        return []

    def cancel(self, request: Request) -> bool:
        """Take a request out of its queue; False if it has begun."""
        self._settled = False
        return any(executor.queue.remove(request) for executor in self.executors)

    def drain(self, error: Exception) -> list[Failure]:
        """End all requests that have not begun."""
        return [failure for x in self.executors for failure in self._fail(self._take_all(x), error)]

    def remove_executor(self, index: int, now: float) -> list[Failure]:
        """An executor is gone: what waited for it goes to others, once; returns the requests that end with that.

        The batch that it ran ends with an error.
        """
        self._settled = False
        executor = self.executors[index]
        executor.alive = False
        failures, waiting = [], self._take_all(executor)
        if executor.batch is not None:
            started = executor.batch.requests
            if executor.executing:
                failures += self._fail(started, ExecutorDiedError(f"executor {executor.config.name!r} has ended."))
            else:
                waiting = started + waiting
            self._end_batch(executor)
        for request in waiting:
            try:
                if request.requeued:
                    raise ExecutorDiedError(f"two executors of request {request.id} have ended.")
                request.requeued = True
                self._assign(request, self.graph.experts[request.expert], now)
            except CollaborationError as error:
                failures += self._fail([request], error)
        return failures

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return sum(len(executor.queue) for executor in self.executors)

    # -- assignment (paper section 4.2) --

    def _assign(self, request: Request, expert: ExpertInfo, now: float) -> int:
        additions = [self._addition(x, expert) for x in self.executors]
        totals = [x.total(now) if x.alive else 0.0 for x in self.executors]
        if all(addition is None for addition in additions):
            raise ExecutorDiedError(f"no executor that is left can run expert {expert.name!r}.")
        if self.policy.assign == "makespan":
            index = assign(totals, additions)
        else:
            able = [x for x, addition in enumerate(additions) if addition is not None]
            index = able[self._turn % len(able)]
            self._turn += 1
        chosen = self.executors[index]
        request.latency = additions[index] or 0.0
        joined = chosen.queue.add(request)
        self._settled &= joined and chosen.batch is not None
        if self._on_decision:
            self._on_decision(Decision(request=request, totals=totals, additions=additions, executor=index))
        return index

    def _addition(self, executor: ExecutorState, expert: ExpertInfo) -> float | None:
        """The additional inference latency of a request for this expert; None if the executor cannot run it."""
        profile = self.profiles.get((expert.architecture, executor.config.processor))
        if profile is None or not executor.alive or expert.bytes > executor.pool.budget:
            return None
        queued = executor.queue.count(expert.name)
        starts = queued % self._max_batch(executor, profile) == 0 if self.policy.counts_batches else queued == 0
        seconds = profile.k + (profile.b if starts else 0.0)
        if queued or executor.pool.has(expert.name):
            return seconds
        return seconds + profile.load_seconds(self.manager.tier(expert.name, executor.pool)[0])

    # -- what may begin --

    def poll(self, now: float) -> list[Action]:
        """What is to be done now; `Load`s and `Batch`es are under way from here on."""
        if self._settled:
            return []
        self._settled = True
        actions: list[Action] = []
        for executor in self.executors:
            if executor.alive:
                self._advance(executor, now, actions)
        return actions

    def _advance(self, executor: ExecutorState, now: float, actions: list[Action]) -> None:
        goes_on = True
        while goes_on and not executor.executing:
            if executor.batch is not None:
                goes_on = self._begin_execution(executor, now, actions)
            elif group := self._next_group(executor, now):
                actions += self._expire(executor, group, now)
                goes_on = not group.requests or self._begin_batch(executor, group, now, actions)
            else:
                goes_on = False
        if self.policy.prefetch and executor.executing and executor.loading is None:
            self._prefetch(executor, now, actions)

    def _next_group(self, executor: ExecutorState, now: float) -> Group | None:
        """The queue's first group; or the first whose expert is there, if that may go before others."""
        first, limit = executor.queue.first(), self.policy.max_age
        if first is None or not self.policy.resident_first or executor.pool.is_ready(first.expert):
            return first
        if limit is not None and now - first.requests[0].arrival > limit:
            return first
        ready = (group for group in executor.queue.groups() if executor.pool.is_ready(group.expert))
        return next(ready, first)

    def _expire(self, executor: ExecutorState, group: Group, now: float) -> list[Action]:
        late = [request for request in group.requests if request.deadline is not None and request.deadline < now]
        for request in late:
            executor.queue.remove(request)
        return [
            *self._fail(late, DeadlineExceededError("the deadline passed before the request's expert could begin."))
        ]

    def _begin_batch(self, executor: ExecutorState, group: Group, now: float, actions: list[Action]) -> bool:
        """Take a batch from a group (paper section 4.2, splitting); or all of it, if not even one request fits.

        False: memory for one request is waited for.
        """
        profile, pool = self.manager.profile(executor, group.expert), executor.pool
        count = self._batch_size(executor, profile, len(group.requests))
        if count == 0:  # experts make room for one request
            missing = profile.activation_bytes - (executor.config.activation_bytes or 0)
            never = missing + self.graph.experts[group.expert].bytes > pool.budget
            evict = None if never else self.manager.lend(executor, missing, group.expert)
            if evict is None:
                if not never and self.manager.will_free(executor):
                    return False
                problem = f"one request takes {missing} bytes more than the executor has beside its experts"
                requests = executor.queue.take(group, len(group.requests))
                actions += self._fail(requests, InsufficientMemoryError(f"expert {group.expert!r}: {problem}."))
                return True
            if evict.evictions:
                actions.append(evict)
            count = 1
        executor.batch = Batch(executor.index, group.expert, executor.queue.take(group, count), now)
        executor.ends = now + profile.seconds(count)
        return True

    def _batch_size(self, executor: ExecutorState, profile: Profile, waiting: int) -> int:
        """How many of the requests that wait go into a batch; 0 if not even one fits the memory for activations."""
        count, limit = min(waiting, self._max_batch(executor, profile)), executor.config.activation_bytes
        if limit is not None and profile.activation_bytes:
            count = min(count, limit // profile.activation_bytes)
        if not self.policy.avoids_padding or count == 0:
            return count
        padded = min((size for size in profile.latency if size >= count), default=count)
        smaller = max((size for size in profile.latency if size <= count), default=count)
        return smaller if (padded - count) / padded > MAX_PADDING else count

    def _max_batch(self, executor: ExecutorState, profile: Profile) -> int:
        return min(profile.max_batch, self.policy.max_batch or profile.max_batch)

    def _begin_execution(self, executor: ExecutorState, now: float, actions: list[Action]) -> bool:
        """Run the batch, or have its expert come; or end it, if there is no room. False: the expert is waited for."""
        batch, pool = executor.batch, executor.pool
        assert batch is not None
        profile = self.manager.profile(executor, batch.expert)
        if pool.is_ready(batch.expert):
            pool.use(batch.expert)
            executor.executing, executor.ends = True, now + profile.seconds(len(batch.requests))
            actions.append(batch)
            return True
        if pool.has(batch.expert) or executor.loading is not None:
            return False
        load = self.manager.begin_load(executor, batch.expert)
        if load is not None:
            executor.ends = now + profile.load_seconds(load.tier) + profile.seconds(len(batch.requests))
            actions.append(load)
            return False
        if self.manager.will_free(executor):
            return False
        self._end_batch(executor)
        error = InsufficientMemoryError(f"expert {batch.expert!r}: experts that may not leave take its room.")
        actions += self._fail(batch.requests, error)
        return True

    def _prefetch(self, executor: ExecutorState, now: float, actions: list[Action]) -> None:
        """Load the next expert that is not there, unless one had to leave that is needed as soon, by any executor.

        Otherwise executors that share a pool could go on loading in place of one another.
        """
        for place_, name in enumerate(self._ahead(executor)):
            if not executor.pool.has(name):
                users = [self._ahead(x) for x in self.executors if x.pool is executor.pool and x.alive]
                keep = {other for ahead in users for other in ahead[: place_ + 1]}
                load = self.manager.begin_load(executor, name, keep=keep, prefetched=True)
                if load is not None:
                    actions.append(load)
                return

    def _ahead(self, executor: ExecutorState) -> list[str]:
        """The experts that will run next."""
        experts, limit = executor.queue.experts(), self.policy.prefetch
        if self.policy.resident_first:
            resident = executor.pool.resident
            ready = [name for name in experts if name in resident][:limit]
            experts = [*ready, *(name for name in experts if name not in ready)] if len(ready) < limit else ready
        return experts[:limit]

    # -- what goes wrong --

    def _require_loadable(self, name: str, now: float) -> None:
        found = self._quarantined.get(name)
        if found is not None and now < found.until:
            raise LoadError(f"expert {name!r} is tried again in {found.until - now:.1f} s: {found.reason}")

    def _quarantine(self, name: str, error: Exception, now: float) -> list[Failure]:
        """Have an expert not be loaded for a while; all that waits for it ends."""
        before = self._quarantined.get(name)
        back_off = before.back_off * 2 if before else FIRST_BACK_OFF
        self._quarantined[name] = _Quarantine(now + back_off, back_off, str(error))
        failed = [request for x in self.executors for request in x.queue.remove_expert(name)]
        for executor in self.executors:
            if executor.batch is not None and executor.batch.expert == name and not executor.executing:
                failed += executor.batch.requests
                self._end_batch(executor)
        shown = LoadError(f"expert {name!r} cannot be loaded: {error}")
        shown.__cause__ = error
        return self._fail(failed, shown)

    def _fail(self, requests: Iterable[Request], error: Exception) -> list[Failure]:
        failures = [Failure(request=request, error=error) for request in requests]
        self.statistics.failed += len(failures)
        return failures

    def _end_batch(self, executor: ExecutorState) -> None:
        assert executor.batch is not None
        self._settled = False
        if executor.executing:
            executor.pool.release(executor.batch.expert)
        self.manager.take_back(executor)
        executor.batch, executor.executing = None, False

    def _take_all(self, executor: ExecutorState) -> list[Request]:
        return [request for name in executor.queue.experts() for request in executor.queue.remove_expert(name)]
