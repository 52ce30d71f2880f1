"""CoServe's scheduler: which executor gets a request, what each runs next, and which experts are in its memory.

It has no thread and no clock. Its driver (the simulator, or a loop with real executors) tells it of events (`submit`,
`loaded`, `executed`), asks for what may begin now (`poll`), and has that done.
"""

import contextlib
from collections.abc import Iterable

from jaxinfer.experts.errors import (
    ExecutorDiedError,
    InsufficientMemoryError,
    LoadError,
)
from jaxinfer.experts.scheduling.assignment import assign
from jaxinfer.experts.scheduling.deadlines import Deadlines
from jaxinfer.experts.scheduling.executor_state import ExecutorConfig, ExecutorState
from jaxinfer.experts.scheduling.expert_manager import ExpertManager, missing_bytes
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo
from jaxinfer.experts.scheduling.next_batch import batch_size, max_batch, next_experts, next_group
from jaxinfer.experts.scheduling.policy import Policy
from jaxinfer.experts.scheduling.profile import Profiles
from jaxinfer.experts.scheduling.quarantine import Quarantines
from jaxinfer.experts.scheduling.queue import Group
from jaxinfer.experts.scheduling.request import Action, Batch, Failure, Load, Request
from jaxinfer.serving.errors import DeadlineExceededError, FailedError, OverloadedError, caused

FEW_DEADLINES = 64
"""Number of deadlines of begun requests that is always kept, however few requests wait."""
LIMITED = 60.0
"""Seconds for which a pool is limited to less memory, after a load has found less than was given."""


class Scheduler:
    """Decider for all executors of a system.

    Args:
      graph: the experts.
      profiles: the experts' costs.
      executors: the executors' configs in the order of their indices, accelerators first.
      policy: the policy to follow.
      host_bytes: bytes of the host cache, where the policy uses one.
      max_waiting: waiting requests beyond which new ones are refused.

    Attributes:
      manager: the manager of the experts' memory.
      executors: the executors' states.
      statistics: the counters.

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
        max_waiting: int | None = None,
    ):
        self.graph, self.profiles, self.policy = graph, profiles, policy
        self.manager = ExpertManager(graph, profiles, executors, policy, host_bytes=host_bytes)
        self.executors, self.statistics = self.manager.executors, self.manager.statistics
        self._max_waiting = max_waiting
        self._quarantines, self._deadlines = Quarantines(), Deadlines()
        self._turn = 0
        self._settled = False  # whether nothing can begin before an event

    # -- events --

    def submit(self, request: Request, now: float) -> int:
        """Assign a request, unless too many wait; return the executor's index. Raises as `check`."""
        self._check_room(request, now)
        return self.admit(request, now)

    def check(self, request: Request, now: float, *, ahead: int) -> None:
        """Refuse a request that cannot be served now, and change nothing.

        ahead: the number of requests that will be admitted before it.

        Raises RoutingError, OverloadedError (for an input's first stage), LoadError while its expert is in quarantine.
        """
        additions = self._additions(self.graph.require(request.expert), now)
        self._check_room(request, now, ahead, min(seconds for seconds in additions if seconds is not None))

    def admit(self, request: Request, now: float) -> int:
        """Assign a request that was checked; return the executor's index. Raises RoutingError, LoadError as `check`."""
        index = self._assign(request, self.graph.require(request.expert), now)
        self.manager.usage.add(request)
        if request.deadline is not None:
            if len(self._deadlines) > 2 * self.queued + FEW_DEADLINES:  # most are of requests that have begun
                self._deadlines.keep(self._waits)
            self._deadlines.add(request, request.deadline)
        return index

    def _check_room(self, request: Request, now: float, ahead: int = 0, seconds: float = 0.0) -> None:
        """Raise OverloadedError if too many wait. seconds: what each of those that are `ahead` may take."""
        waiting = self.queued + ahead
        if self._max_waiting is not None and request.stage == 0 and waiting >= self._max_waiting:
            wait = min((x.total(now) for x in self.executors if x.alive), default=0.0) + ahead * seconds
            raise OverloadedError(
                f"{waiting} requests wait, the limit is {self._max_waiting}; try again in {wait:.1f} s.", wait
            )

    def loaded(self, load: Load, now: float, error: Exception | None = None) -> list[Failure]:
        """Note that a load has ended; return the requests that its error ends.

        After an InsufficientMemoryError other experts leave, if possible, and the load is tried again. Any other error
        concerns this expert in this pool: requests that wait for it move to other executors, once.
        """
        self._settled = False
        self.manager.end_load(load, loaded=error is None)
        if error is None:
            self._quarantines.forget(load)
            return []
        if isinstance(error, InsufficientMemoryError) and self.manager.limit(load, now + LIMITED):
            return []
        return self._quarantine(load, error, now)

    def wake(self) -> None:
        """Look for what can begin, in the next `poll`: there is more memory."""
        self._settled = False

    def retry(self, expert: str) -> None:
        """Allow an expert that failed to load to be loaded again at once."""
        self._quarantines.lift(expert)

    def executed(self, batch: Batch, now: float, error: Exception | None = None) -> list[Failure]:
        """Note that a batch has ended; return the requests that its error ends.

        Following stages are new submissions.
        """
        executor = self.executors[batch.executor]
        self._end_batch(executor)
        if error is not None:
            return self._fail(batch.requests, error)
        self.statistics.batches += 1
        self.statistics.requests += len(batch.requests)
        return []

    def cancel(self, request: Request) -> bool:
        """Remove a request from its queue, or from a batch that waits for its expert; return False if it has begun."""
        self._settled = False
        for executor in self.executors:
            batch = executor.batch
            if executor.queue.remove(request):
                return True
            if batch is not None and not executor.executing and request in batch.requests:
                batch.requests.remove(request)
                if not batch.requests:
                    self._end_batch(executor)
                return True
        return False

    def drain(self, error: Exception) -> list[Failure]:
        """End all requests that have not begun."""
        return [failure for x in self.executors for failure in self._fail(self._take_all(x), error)]

    def remove_executor(self, index: int, now: float) -> list[Failure]:
        """Remove an executor; return the requests that end with it.

        Requests that wait for it move to others, once. The batch that it ran ends with an error.
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
        died = ExecutorDiedError(f"executor {executor.config.name!r} has ended, and no other one can take its request.")
        return failures + self._requeue(waiting, died, now)

    @property
    def next_deadline(self) -> float | None:
        """When `poll` has a request to end, if nothing else happens before."""
        return self._deadlines.next

    @property
    def queued(self) -> int:
        """The number of requests that wait."""
        return sum(len(executor.queue) for executor in self.executors)

    # -- assignment (paper section 4.2) --

    def _assign(self, request: Request, expert: ExpertInfo, now: float) -> int:
        additions = self._additions(expert, now)
        totals = [x.total(now) if x.alive else 0.0 for x in self.executors]
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
        return index

    def _additions(self, expert: ExpertInfo, now: float) -> list[float | None]:
        """Each executor's `_addition`. Raises the error that says why no executor can run the expert."""
        self.manager.lift_limits(now)
        additions = [self._addition(x, expert, now) for x in self.executors]
        if all(addition is None for addition in additions):
            raise self._why_none(expert, now)
        return additions

    def _addition(self, executor: ExecutorState, expert: ExpertInfo, now: float) -> float | None:
        """The additional inference latency of a request for this expert; None if the executor cannot run it."""
        if not executor.alive or not self.manager.can_serve(executor, expert):
            return None
        if self._quarantines.find(expert.name, executor.pool.index, now):
            return None
        profile = self.manager.profile(executor, expert.name)
        queued = executor.queue.count(expert.name)
        starts = queued % max_batch(profile, self.policy) == 0 if self.policy.counts_batches else queued == 0
        seconds = profile.k + (profile.b if starts else 0.0)
        if queued or executor.pool.has(expert.name):
            return seconds
        return seconds + profile.load_seconds(self.manager.tier(expert.name, executor.pool)[0])

    # -- beginnings --

    def poll(self, now: float) -> list[Action]:
        """Decide the actions to begin now; `Load`s and `Batch`es count as running from then on."""
        actions: list[Action] = [*self._expire(now)]
        if self._settled:
            return actions
        self._settled = True
        for executor in self.executors:
            if executor.alive:
                self._advance(executor, now, actions)
        return actions

    def _advance(self, executor: ExecutorState, now: float, actions: list[Action]) -> None:
        goes_on = True
        while goes_on and not executor.executing:
            if executor.batch is not None:
                goes_on = self._begin_execution(executor, now, actions)
            elif following := next_group(executor, self.policy, now, deadlines=bool(self._deadlines)):
                goes_on = self._begin_batch(executor, *following, now, actions)
            else:
                goes_on = False
        if self.policy.prefetch and executor.executing and executor.loading is None:
            self._prefetch(executor, now, actions)

    def _waits(self, request: Request) -> bool:
        return any(
            request in x.queue or (x.batch and not x.executing and request in x.batch.requests) for x in self.executors
        )

    def _expire(self, now: float) -> list[Failure]:
        """End the requests whose deadlines have passed before they began."""
        late = [request for request in self._deadlines.pop_passed(now) if self.cancel(request)]
        return self._fail(late, DeadlineExceededError("the deadline passed before the request's expert could begin."))

    def _begin_batch(
        self, executor: ExecutorState, group: Group, urgent: Request | None, now: float, actions: list[Action]
    ) -> bool:
        """Take a batch from a group (paper section 4.2, splitting); end the group if not even one request fits.

        urgent: the request that comes first; None: all come in their turn.

        Returns False while memory for one request is not free yet.
        """
        profile, pool = self.manager.profile(executor, group.expert), executor.pool
        count = batch_size(executor, profile, self.policy, len(group.requests))
        if count == 0:  # evict experts for one request
            if executor.loading is not None and not pool.has(group.expert):
                return False  # otherwise each could hold room for one part and wait for the other's
            missing = missing_bytes(executor, profile)
            evict = self.manager.reserve(executor, missing, group.expert)
            if evict is None:
                if self.manager.will_free(executor):
                    return False
                problem = f"one request takes {missing} bytes more than the executor has beside its experts"
                requests = executor.queue.take(group, len(group.requests))
                actions += self._fail(requests, InsufficientMemoryError(f"expert {group.expert!r}: {problem}."))
                return True
            if evict.evictions:
                actions.append(evict)
            count = 1
        executor.batch = Batch(executor.index, group.expert, executor.queue.take(group, count, urgent), now)
        executor.ends = now + profile.seconds(count)
        return True

    def _begin_execution(self, executor: ExecutorState, now: float, actions: list[Action]) -> bool:
        """Run the batch, or load its expert; end it if there is no room. Return False while the expert is not there."""
        batch, pool = executor.batch, executor.pool
        assert batch is not None
        profile = self.manager.profile(executor, batch.expert)
        if pool.is_ready(batch.expert):
            pool.pin(batch.expert)
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
        """Load the next missing expert, unless that evicts one that an executor needs as soon.

        Otherwise executors that share a pool could evict one another's prefetched experts for ever.
        """
        for place_, name in enumerate(next_experts(executor, self.policy)):
            if not executor.pool.has(name):
                users = [next_experts(x, self.policy) for x in self.executors if x.pool is executor.pool and x.alive]
                keep = {other for ahead in users for other in ahead[: place_ + 1]}
                load = self.manager.begin_load(executor, name, keep=keep, prefetched=True)
                if load is not None:
                    actions.append(load)
                return

    # -- failures --

    def _why_none(self, expert: ExpertInfo, now: float) -> FailedError:
        """The error that says why no executor can run an expert now."""
        alive = [x for x in self.executors if x.alive]
        entries = [self._quarantines.find(expert.name, x.pool.index, now) for x in alive]
        if quarantines := [each for each in entries if each]:
            soonest = min(quarantines, key=lambda each: each.until)
            return LoadError(f"expert {expert.name!r} is tried again in {soonest.until - now:.1f} s: {soonest.reason}")
        if self.manager.limited and alive:
            return InsufficientMemoryError(f"expert {expert.name!r}: its device has less memory free than was given.")
        return ExecutorDiedError(f"no executor that is left can run expert {expert.name!r}.")

    def _quarantine(self, load: Load, error: Exception, now: float) -> list[Failure]:
        """Forbid loading an expert to a pool for a while; requests that wait for it move elsewhere, or end."""
        self._quarantines.begin(load, error, now)
        name, waiting = load.expert, []
        for executor in self.executors:
            if executor.pool.index == load.pool:
                if executor.batch is not None and executor.batch.expert == name and not executor.executing:
                    waiting += executor.batch.requests
                    self._end_batch(executor)
                waiting += executor.queue.remove_expert(name)
        return self._requeue(waiting, caused(LoadError(f"expert {name!r} cannot be loaded: {error}"), error), now)

    def _requeue(self, requests: Iterable[Request], error: Exception, now: float) -> list[Failure]:
        """Move requests to other executors, once; those that none can run end with this error."""
        failed = []
        for request in requests:
            if not request.requeued:
                request.requeued = True
                with contextlib.suppress(FailedError):
                    self._assign(request, self.graph.experts[request.expert], now)
                    continue
            failed.append(request)
        return self._fail(failed, error)

    def _fail(self, requests: Iterable[Request], error: Exception) -> list[Failure]:
        return [Failure(request=request, error=error) for request in requests]

    def _end_batch(self, executor: ExecutorState) -> None:
        assert executor.batch is not None
        self._settled = False
        if executor.executing:
            executor.pool.unpin(executor.batch.expert)
        self.manager.give_back(executor)
        executor.batch, executor.executing = None, False

    def _take_all(self, executor: ExecutorState) -> list[Request]:
        return [request for name in executor.queue.experts() for request in executor.queue.remove_expert(name)]
