"""CoServe's scheduler: which executor gets a request, what it runs next, and which experts are in its memory.

It has no thread and no clock. Whoever drives it (the simulator, or real executors) tells it what has happened
(`submit`, `loaded`, `executed`), asks what may begin now (`poll`), and has that done.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jaxinfer.collaboration.errors import (
    CollaborationError,
    ConfigError,
    DeadlineExceededError,
    ExecutorDiedError,
    InsufficientMemoryError,
    LoadError,
    OverloadedError,
    ProfileError,
)
from jaxinfer.collaboration.scheduling.assignment import assign
from jaxinfer.collaboration.scheduling.eviction import first_in, queue_aware, two_stage
from jaxinfer.collaboration.scheduling.experts import ExpertGraph, ExpertInfo
from jaxinfer.collaboration.scheduling.placement import place
from jaxinfer.collaboration.scheduling.policy import Policy
from jaxinfer.collaboration.scheduling.pool import ModelPool
from jaxinfer.collaboration.scheduling.profile import Profile, Profiles, Tier
from jaxinfer.collaboration.scheduling.queue import ExecutorQueue, Group
from jaxinfer.collaboration.scheduling.request import Action, Batch, Evict, Eviction, Failure, Load, Request
from jaxinfer.streaming.residents import Residents

MAX_PADDING = 0.25
FIRST_BACK_OFF = 1.0
"""Seconds before an expert that could not be loaded is tried again; each further failure doubles them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """An executor and its memory.

    Attributes:
      name: for people.
      processor: what it runs on, as profiles name it: "gpu", "cpu".
      device: executors on the same device can share a pool.
      expert_bytes: of its pool.
      activation_bytes: what a batch may take beside that; None: no limit but the profile's `max_batch`.
    """

    name: str
    processor: str
    device: str
    expert_bytes: int
    activation_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("expert_bytes", "activation_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"executor {self.name!r}: {name} must be at least 1, got {value}.")


@dataclasses.dataclass(eq=False)
class ExecutorState:
    """What the scheduler knows of an executor.

    Attributes:
      batch: taken from the queue, and not done.
      executing: whether its expert runs; otherwise it is waited for.
      loading: the expert that its loader brings.
      ends: when the batch should end.
      alive: whether it takes requests.
    """

    index: int
    config: ExecutorConfig
    pool: ModelPool
    queue: ExecutorQueue
    batch: Batch | None = None
    executing: bool = False
    loading: str | None = None
    ends: float = 0.0
    alive: bool = True

    def total(self, now: float) -> float:
        """Seconds until all that it has is done (paper section 4.2)."""
        return (max(self.ends - now, 0.0) if self.batch else 0.0) + self.queue.latency


@dataclasses.dataclass(kw_only=True)
class Statistics:
    """What a scheduler has done.

    Attributes:
      loads: experts that came to a pool after the start (the paper's expert switches), by where they came from.
      prefetched: how many of them came before their batch needed them.
      evictions: experts that left a pool.
      batches, requests: that were executed.
      failed: requests that ended with an error.
    """

    loads: Counter[Tier] = dataclasses.field(default_factory=Counter)
    prefetched: int = 0
    evictions: int = 0
    batches: int = 0
    requests: int = 0
    failed: int = 0

    @property
    def switches(self) -> int:
        """All loads."""
        return self.loads.total()


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
      pools: all pools; executors with a shared pool have the same one.
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
        self.statistics = Statistics()
        configs = list(executors)
        if not configs:
            raise ConfigError("there are no executors.")
        if policy.one_executor:
            configs = [_joined(configs)]
        self.pools: list[ModelPool] = []
        self.executors: list[ExecutorState] = []
        self._host: Residents[str, None] = Residents(host_bytes if policy.host_cache else 0, order=self._host_order)
        self._taken: set[str] = set()  # copies in the host cache that are on their way to a pool
        self._sources: Counter[int] = Counter()  # loads under way from each pool
        self._max_queued, self._on_decision = max_queued, on_decision
        self._quarantined: dict[str, _Quarantine] = {}
        self._turn = 0
        self._settled = False  # whether nothing can begin before something happens
        shared = policy.share_pools
        budgets: dict[str, int] = {}
        for config in configs:
            budgets[config.device] = budgets.get(config.device, 0) + config.expert_bytes
        devices: dict[str, ModelPool] = {}
        for config in configs:
            pool = devices.get(config.device) if shared else None
            if pool is None:
                budget = budgets[config.device] if shared else config.expert_bytes
                pool = devices[config.device] = ModelPool(len(self.pools), budget, self._order)
                self.pools.append(pool)
            self._add(config, pool)
        self._check()

    # -- before the start --

    def place(self) -> dict[int, list[str]]:
        """The experts that each pool has at the start, by the pool's index; they count as loaded from now on."""
        experts = [self.graph.experts[name] for name in self.graph.by_usage]
        placed = place(experts, [pool.budget for pool in self.pools], self._can_run)
        for pool, names in zip(self.pools, placed, strict=True):
            for name in reversed(names):  # the most used one counts as the one used last
                pool.begin_load(name, self.graph.experts[name].bytes)
                pool.end_load(name, loaded=True, pinned=self.graph.experts[name].pinned)
        return dict(enumerate(placed))

    def remove_placed(self, pool: int, name: str) -> None:
        """An expert that `place` has put into a pool could not be loaded."""
        if self.graph.experts[name].pinned:
            self.pools[pool].release(name)
        self.pools[pool].drop(name)

    def _can_run(self, expert: ExpertInfo, pool: int) -> bool:
        able = [x for x in self.executors if (expert.architecture, x.config.processor) in self.profiles]
        return any(x.pool.index == pool for x in able)

    def add_executor(self, config: ExecutorConfig) -> int:
        """Have one more executor, with a pool of its own; returns its index."""
        pool = ModelPool(len(self.pools), config.expert_bytes, self._order)
        self.pools.append(pool)
        return self._add(config, pool)

    def _add(self, config: ExecutorConfig, pool: ModelPool) -> int:
        queue = ExecutorQueue(arranged=self.policy.arrange, max_age=self.policy.max_age)
        self.executors.append(ExecutorState(len(self.executors), config, pool, queue))
        return len(self.executors) - 1

    def _check(self) -> None:
        for expert in self.graph.experts.values():
            able = [x for x in self.executors if (expert.architecture, x.config.processor) in self.profiles]
            if not able:
                processors = sorted({x.config.processor for x in self.executors})
                raise ProfileError(
                    f"expert {expert.name!r}: no profile of {expert.architecture!r} on {', '.join(processors)}."
                )
            if not any(expert.bytes <= x.pool.budget for x in able):
                largest = max(x.pool.budget for x in able)
                raise ConfigError(
                    f"expert {expert.name!r} takes {expert.bytes} bytes and the largest pool has {largest}; give an "
                    "executor more memory for experts."
                )

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
        pool = self.pools[load.pool]
        pool.end_load(load.expert, loaded=error is None, pinned=self.graph.experts[load.expert].pinned)
        self.executors[load.executor].loading = None
        if load.source is not None:
            self.pools[load.source].release(load.expert)
            self._sources[load.source] -= 1
        elif load.tier == "host":
            self._taken.remove(load.expert)
            self._host.unpin(load.expert)
            self._host.remove(load.expert)
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
        return seconds + profile.load_seconds(self._tier(expert.name, executor.pool)[0])

    def _tier(self, name: str, pool: ModelPool) -> tuple[Tier, int | None]:
        """Where an expert is loaded from now, and of which other pool that is the copy."""
        if self.policy.host_cache:
            if name in self._host and name not in self._taken:
                return "host", None
            for executor in self.executors:
                if executor.pool is pool or not executor.alive or executor.config.processor != "cpu":
                    continue
                if executor.pool.is_ready(name):
                    return "host", executor.pool.index
        return "disk", None

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
        profile, pool = self._profile(executor, group.expert), executor.pool
        count = self._batch_size(executor, profile, len(group.requests))
        if count == 0:  # experts make room for one request
            missing = profile.activation_bytes - (executor.config.activation_bytes or 0)
            never = missing + self.graph.experts[group.expert].bytes > pool.budget
            victims = None if never else pool.reserve(_activations(executor), missing, keep=[group.expert])
            if victims is None:
                if not never and self._will_free(executor):
                    return False
                problem = f"one request takes {missing} bytes more than the executor has beside its experts"
                requests = executor.queue.take(group, len(group.requests))
                actions += self._fail(requests, InsufficientMemoryError(f"expert {group.expert!r}: {problem}."))
                return True
            if victims:
                evictions, dropped = self._leave(executor, victims)
                actions.append(Evict(executor=executor.index, pool=pool.index, evictions=evictions, dropped=dropped))
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
        profile = self._profile(executor, batch.expert)
        if pool.is_ready(batch.expert):
            pool.use(batch.expert)
            executor.executing, executor.ends = True, now + profile.seconds(len(batch.requests))
            actions.append(batch)
            return True
        if pool.has(batch.expert) or executor.loading is not None:
            return False
        load = self._begin_load(executor, batch.expert)
        if load is not None:
            executor.ends = now + profile.load_seconds(load.tier) + profile.seconds(len(batch.requests))
            actions.append(load)
            return False
        if self._will_free(executor):
            return False
        self._end_batch(executor)
        error = InsufficientMemoryError(f"expert {batch.expert!r}: experts that may not leave take its room.")
        actions += self._fail(batch.requests, error)
        return True

    def _will_free(self, executor: ExecutorState) -> bool:
        """Whether others are about to give memory of the pool back: its executors, or loads from it."""
        pool = executor.pool
        return bool(pool.loading or self._about_to_run(pool) or self._sources[pool.index]) or any(
            other.executing and other.pool is executor.pool for other in self.executors
        )

    def _about_to_run(self, pool: ModelPool) -> list[str]:
        """Experts that have come to a pool and whose batches have not begun yet."""
        batches = [x.batch for x in self.executors if x.pool is pool and x.batch is not None and not x.executing]
        return [batch.expert for batch in batches if pool.is_ready(batch.expert)]

    def _prefetch(self, executor: ExecutorState, now: float, actions: list[Action]) -> None:
        """Load the next expert that is not there, unless one had to leave that is needed as soon, by any executor.

        Otherwise executors that share a pool could go on loading in place of one another.
        """
        users = [self._ahead(x) for x in self.executors if x.pool is executor.pool and x.alive]
        for place_, name in enumerate(self._ahead(executor)):
            if not executor.pool.has(name):
                keep = {other for ahead in users for other in ahead[: place_ + 1]}
                load = self._begin_load(executor, name, keep=keep, prefetched=True)
                if load is not None:
                    actions.append(load)
                return

    def _ahead(self, executor: ExecutorState) -> list[str]:
        """The experts that will run next."""
        experts, limit = executor.queue.experts(), self.policy.prefetch
        if self.policy.resident_first:
            ready = list(itertools.islice(filter(executor.pool.is_ready, experts), limit))
            experts = [*ready, *(name for name in experts if len(ready) < limit and name not in ready)]
        return experts[:limit]

    def _begin_load(
        self, executor: ExecutorState, name: str, *, keep: Iterable[str] = (), prefetched: bool = False
    ) -> Load | None:
        """Make room for an expert and have it come; None if there can be no room now."""
        pool = executor.pool
        tier, source = self._tier(name, pool)
        keep = [*keep, *self._about_to_run(pool)]
        victims = pool.begin_load(name, self.graph.experts[name].bytes, keep=keep)
        if victims is None:
            return None
        if source is not None:
            self.pools[source].use(name)
            self._sources[source] += 1
        elif tier == "host":
            self._host.pin(name)
            self._taken.add(name)
        evictions, dropped = self._leave(executor, victims)
        executor.loading = name
        self.statistics.loads[tier] += 1
        self.statistics.prefetched += prefetched
        return Load(
            executor=executor.index,
            pool=pool.index,
            expert=name,
            tier=tier,
            source=source,
            evictions=evictions,
            dropped=dropped,
            prefetched=prefetched,
        )

    def _leave(self, executor: ExecutorState, victims: Iterable[str]) -> tuple[tuple[Eviction, ...], tuple[str, ...]]:
        """Experts have left an executor's pool: which of them stay in the host cache, and which ones leave that.

        One that would cost more to copy there and back than to read again does not stay.
        """
        victims, before = list(victims), list(self._host)
        for name in victims:
            profile = self._profile(executor, name)
            pays = profile.evict + profile.load_seconds("host") < profile.load_seconds("disk")
            if name not in self._host and pays:
                self._host.add(name, None, self.graph.experts[name].bytes)
        self.statistics.evictions += len(victims)
        stay = set(self._host) - set(before)
        evictions = tuple(Eviction(expert=name, to_host=name in stay) for name in victims)
        return evictions, tuple(name for name in before if name not in self._host)

    # -- which experts leave (paper section 4.3) --

    def _order(self, free: list[str], pool: ModelPool) -> list[str]:
        match self.policy.evict:
            case "lru":
                return free
            case "fifo":
                return first_in(free, pool.load_order)
            case "two_stage":
                return two_stage(free, pool.resident, self.graph)
            case "queue_aware":
                users = [x for x in self.executors if x.pool is pool]
                return queue_aware(two_stage(free, pool.resident, self.graph), _next_uses(users))

    def _host_order(self, free: list[str]) -> list[str]:
        if self.policy.evict != "queue_aware":
            return free
        return queue_aware(two_stage(free, set(), self.graph), _next_uses(self.executors))

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
        executor.pool.give_back(_activations(executor))
        executor.batch, executor.executing = None, False

    def _take_all(self, executor: ExecutorState) -> list[Request]:
        return [request for name in executor.queue.experts() for request in executor.queue.remove_expert(name)]

    def _profile(self, executor: ExecutorState, name: str) -> Profile:
        return self.profiles[self.graph.experts[name].architecture, executor.config.processor]


def _joined(configs: list[ExecutorConfig]) -> ExecutorConfig:
    """The first executor, with the memory of all that share its device."""
    first = configs[0]
    shared = sum(config.expert_bytes for config in configs if config.device == first.device)
    return dataclasses.replace(first, expert_bytes=shared)


def _activations(executor: ExecutorState) -> str:
    """The name under which a pool lends memory to an executor's batch; no expert has it."""
    return f"\0{executor.index}"


def _next_uses(executors: Iterable[ExecutorState]) -> dict[str, int]:
    """Of experts that wait in a queue, their least places among the groups of one."""
    places: dict[str, int] = {}
    for executor in executors:
        for place_, name in enumerate(executor.queue.experts()):
            places[name] = min(place_, places.get(name, place_))
    return places
