"""Expert management (CoServe, section 4.3): which memory holds which experts, their sources, and evictions."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from jaxinfer.experts.errors import ConfigError, ProfileError
from jaxinfer.experts.scheduling.eviction import first_in, queue_aware, two_stage
from jaxinfer.experts.scheduling.executor_state import ExecutorConfig, ExecutorState, ExpertStatistics
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo
from jaxinfer.experts.scheduling.placement import place
from jaxinfer.experts.scheduling.policy import Policy
from jaxinfer.experts.scheduling.pool import ModelPool
from jaxinfer.experts.scheduling.profile import Profile, Profiles, Tier
from jaxinfer.experts.scheduling.queue import ExecutorQueue
from jaxinfer.experts.scheduling.request import Evict, Eviction, Load
from jaxinfer.experts.scheduling.usage import LearnedUsage
from jaxinfer.serving.budget import Offer
from jaxinfer.streaming.residents import Residents


class ExpertManager:
    """The memory of all executors, and the host cache.

    A pinned expert has a home pool, where it stays once it is loaded; copies elsewhere leave as others do.

    Args:
      graph: the experts.
      profiles: the experts' costs.
      executors: the executors' configs in the order of their indices.
      policy: the policy to follow.
      host_bytes: bytes of the host cache, where the policy uses one.

    Attributes:
      pools: all pools; executors with a shared pool have the same one.
      executors: the executors' states.
      usage: how often each expert is used, learned from requests.
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
        host_bytes: int,
    ):
        self.graph, self.profiles, self.policy, self.usage = graph, profiles, policy, LearnedUsage(graph.usage)
        self.statistics = ExpertStatistics(usage=self.usage)
        configs = list(executors)
        if not configs:
            raise ConfigError("there are no executors.")
        if policy.one_executor:
            configs = [_joined(configs)]
        self.pools: list[ModelPool] = []
        self.executors: list[ExecutorState] = []
        self._host_bytes = host_bytes if policy.host_cache else 0
        self._host: Residents[str, None] = Residents(self._host_bytes, order=self._host_order)
        self._homes: dict[str, int] = {}
        self._pinned: Counter[int] = Counter()  # bytes of the experts at home in each pool
        self._limited: dict[int, float] = {}  # pools limited to less memory than was given, until when
        self._taken: set[str] = set()  # copies in the host cache on their way to a pool
        self._sources: Counter[int] = Counter()  # loads under way, by source pool
        budgets: Counter[str] = Counter()
        for config in configs:
            budgets[config.device] += config.expert_bytes
        shared: dict[str, ModelPool] = {}
        for config in configs:
            if not policy.share_pools:
                self.add_executor(config)
            elif config.device in shared:
                self._add(config, shared[config.device])
            else:
                shared[config.device] = self._add(config, self._new_pool(budgets[config.device])).pool
        self._check()
        self._choose_homes()

    def place(self) -> dict[int, list[str]]:
        """Choose the experts of each pool at the start, by the pool's index; they count as loaded from now on."""
        others = [self.graph.experts[name] for name in self.graph.by_usage if name not in self._homes]
        free = [pool.budget - self._pinned[pool.index] for pool in self.pools]
        placed = place(others, free, self._serving)
        for pool, names in zip(self.pools, placed, strict=True):
            names[:0] = [name for name, home in self._homes.items() if home == pool.index]
            for name in reversed(names):  # the most used one counts as the most recently used
                pool.begin_load(name, self.graph.experts[name].bytes)
                pool.end_load(name, loaded=True, pinned=name in self._homes)
        return dict(enumerate(placed))

    def remove_placed(self, pool: int, name: str) -> None:
        """Remove an expert that `place` has chosen and that could not be loaded."""
        if name in self._homes:
            self.pools[pool].unpin(name)
        self.pools[pool].drop(name)

    def can_serve(self, executor: ExecutorState, expert: ExpertInfo) -> bool:
        """Check whether an executor can run an expert: beside pinned ones it has room for it and one request."""
        profile, pool = self.profiles.get((expert.architecture, executor.config.processor)), executor.pool
        if profile is None:
            return False
        stays = self._pinned[pool.index] - (expert.bytes if self._homes.get(expert.name) == pool.index else 0)
        return stays + expert.bytes + missing_bytes(executor, profile) <= pool.budget

    def _serving(self, expert: ExpertInfo, pool: int | None = None) -> bool:
        """Check whether an executor (of this pool, if given) can run an expert."""
        return any(self.can_serve(x, expert) for x in self.executors if pool in (None, x.pool.index))

    def add_executor(self, config: ExecutorConfig) -> int:
        """Add an executor with a pool of its own; return its index."""
        return self._add(config, self._new_pool(config.expert_bytes)).index

    def _new_pool(self, budget: int) -> ModelPool:
        self.pools.append(ModelPool(len(self.pools), budget, self._order))
        return self.pools[-1]

    def _add(self, config: ExecutorConfig, pool: ModelPool) -> ExecutorState:
        queue = ExecutorQueue(arranged=self.policy.arrange, max_age=self.policy.max_age)
        self.executors.append(ExecutorState(len(self.executors), config, pool, queue))
        return self.executors[-1]

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
            if not self._serving(expert):
                least = min(missing_bytes(x, self.profile(x, expert.name)) for x in able)
                raise ConfigError(
                    f"expert {expert.name!r} takes {expert.bytes} bytes and one request at least {least} more than an "
                    "executor has for activations, which no pool has room for together; give an executor more memory."
                )

    def _choose_homes(self) -> None:
        """Choose the home pools of pinned experts, in turn, so that every expert can still run somewhere."""
        pinned = [expert for name in self.graph.by_usage if (expert := self.graph.experts[name]).pinned]
        kinds = {(x.architecture, x.bytes): x for x in self.graph.experts.values() if not x.pinned}
        turn = 0
        for expert in pinned:
            for step in range(len(self.pools)):
                home = (turn + step) % len(self.pools)
                if self._serving(expert, home):
                    self._homes[expert.name] = home
                    self._pinned[home] += expert.bytes
                    if all(map(self._serving, (*kinds.values(), *pinned))):
                        turn = home + 1
                        break
                    self._pinned[home] -= expert.bytes
                    del self._homes[expert.name]
            else:
                raise ConfigError(
                    f"expert {expert.name!r} is pinned, and in whichever pool it stays, it leaves too little room for "
                    "another expert to run; pin fewer, or give an executor more memory for experts."
                )

    # -- missing memory --

    def limit(self, load: Load, until: float) -> bool:
        """Limit a pool to its present size after a load that ran out of memory.

        Args:
          until: when to try all the memory given again.

        Returns:
          False if the present size is too small for that expert.
        """
        executor, expert = self.executors[load.executor], self.graph.experts[load.expert]
        executor.pool.limit(executor.pool.used)
        room = executor.pool.victims(expert.bytes) is not None or self.will_free(executor)
        if not (room and self.can_serve(executor, expert)):
            executor.pool.limit(None)
            return False
        self._limited[load.pool] = until
        return True

    @property
    def limited(self) -> bool:
        """Whether a pool is limited to less memory than was given."""
        return bool(self._limited)

    def lift_limits(self, now: float) -> None:
        """Allow pools all the memory given again, once their limits expire."""
        for index in [index for index, until in self._limited.items() if until <= now]:
            self.pools[index].limit(None)
            del self._limited[index]

    # -- loads --

    def tier(self, name: str, pool: ModelPool) -> tuple[Tier, int | None]:
        """The tier that an expert is loaded from to a pool now, and the other pool whose copy that is."""
        if self.policy.host_cache:
            if name in self._host and name not in self._taken:
                return "host", None
            for executor in self.executors:
                if executor.pool is pool or not executor.alive or not executor.config.on_host:
                    continue
                if executor.pool.is_ready(name):
                    return "host", executor.pool.index
        return "disk", None

    def begin_load(
        self, executor: ExecutorState, name: str, *, keep: Iterable[str] = (), prefetched: bool = False
    ) -> Load | None:
        """Make room for an expert and begin to load it; return None if there can be no room now."""
        pool = executor.pool
        tier, source = self.tier(name, pool)
        keep = [*keep, *self._about_to_run(pool)]
        victims = pool.begin_load(name, self.graph.experts[name].bytes, keep=keep)
        if victims is None:
            return None
        if source is not None:
            self.pools[source].pin(name)
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
        """Decide which experts that have left a pool stay in the host cache, and which ones leave that.

        An expert that costs more to copy there and back than to read again does not stay.
        """
        victims, before = list(victims), list(self._host)
        for name in victims:
            profile = self.profile(executor, name)
            pays = profile.evict + profile.load_seconds("host") < profile.load_seconds("disk")
            if name not in self._host and pays:
                self._host.add(name, None, self.graph.experts[name].bytes)
        self.statistics.evictions += len(victims)
        stay = set(self._host) - set(before)
        evictions = tuple(Eviction(expert=name, to_host=name in stay) for name in victims)
        return evictions, tuple(name for name in before if name not in self._host)

    def end_load(self, load: Load, *, loaded: bool) -> None:
        """Note that a load has ended; the expert is there unless it failed."""
        pinned = self._homes.get(load.expert) == load.pool
        self.pools[load.pool].end_load(load.expert, loaded=loaded, pinned=pinned)
        self.executors[load.executor].loading = None
        if load.source is not None:
            self.pools[load.source].unpin(load.expert)
            self._sources[load.source] -= 1
        elif load.tier == "host":
            self._taken.remove(load.expert)
            self._host.unpin(load.expert)
            self._host.remove(load.expert)

    # -- memory lent to other owners --

    def offer(self, pool: ModelPool) -> Offer:
        """The bytes of each device that a pool could lend, and the seconds to load its experts again.

        It keeps its pinned experts and room for any other, and the experts that requests wait for.
        """
        executor = next(x for x in self.executors if x.pool is pool)
        keep = {*self._about_to_run(pool), *_next_uses(self.executors)}
        unused = [name for name in pool.unused if name not in keep]
        seconds = (self.profile(executor, name).load_seconds(self.tier(name, pool)[0]) for name in unused)
        full = self._own_bytes(pool)
        spare = full - pool.used + sum(self.graph.experts[name].bytes for name in unused)
        return Offer(max(min(spare, full - self._floor(pool)), 0), sum(seconds))

    def lend(self, pool: ModelPool, size: int) -> Evict | None:
        """Lend bytes of a pool until `take_back`; returns the action that evicts the experts, None if it cannot."""
        executor = next(x for x in self.executors if x.pool is pool)
        keep = [*self._about_to_run(pool), *_next_uses(self.executors)]
        victims = pool.lend(self._own_bytes(pool) - size, keep=keep)
        if victims is None:
            return None
        evictions, dropped = self._leave(executor, victims)
        return Evict(executor=executor.index, pool=pool.index, evictions=evictions, dropped=dropped)

    def _own_bytes(self, pool: ModelPool) -> int:
        """The bytes of a pool that experts could fill."""
        return min(pool.budget, self._all_bytes)

    @property
    def _all_bytes(self) -> int:
        return sum(expert.bytes for expert in self.graph.experts.values())

    def _floor(self, pool: ModelPool) -> int:
        """The bytes that a pool needs to run any expert that it can run now."""
        users = [x for x in self.executors if x.pool is pool]
        kinds = {(x.architecture, x.bytes): x for x in self.graph.experts.values()}.values()
        needs = [
            expert.bytes + missing_bytes(x, self.profile(x, expert.name))
            for x in users
            for expert in kinds
            if self.can_serve(x, expert)
        ]
        return self._pinned[pool.index] + max(needs, default=0)

    def offer_of_host(self) -> Offer:
        """The bytes that the host cache could lend, at the seconds that loading from disk takes longer."""
        unused = [self.graph.experts[name] for name in self._host.unpinned]
        seconds = sum(min(map(_saved_by_host, self._profiles_of(expert))) for expert in unused)
        spare = min(self._host.budget, self._all_bytes) - self._host.used
        return Offer(max(spare + sum(expert.bytes for expert in unused), 0), seconds)

    def lend_of_host(self, size: int) -> tuple[str, ...]:
        """Lend bytes of the host cache until `take_back`, at most what was offered; return the experts that leave."""
        budget = min(self._host.budget, self._all_bytes) - size
        dropped = tuple(self._host.evict(max(self._host.budget - budget, 0)))
        self._host.budget = budget
        return dropped

    def take_back(self) -> None:
        """Have all memory again that was lent."""
        for pool in self.pools:
            pool.take_back()
        self._host.budget = self._host_bytes

    def _profiles_of(self, expert: ExpertInfo) -> list[Profile]:
        processors = {executor.config.processor for executor in self.executors}
        keys = [(expert.architecture, processor) for processor in processors]
        return [self.profiles[key] for key in keys if key in self.profiles]

    # -- memory of batches --

    def reserve(self, executor: ExecutorState, size: int, expert: str) -> Evict | None:
        """Reserve memory for a batch and its expert until `give_back`, evicting experts; return None if impossible."""
        pool = executor.pool
        spare_bytes = 0 if pool.has(expert) else self.graph.experts[expert].bytes
        keep = [expert, *self._about_to_run(pool)]
        victims = pool.reserve(_activations(executor), size, spare_bytes=spare_bytes, keep=keep)
        if victims is None:
            return None
        evictions, dropped = self._leave(executor, victims)
        return Evict(executor=executor.index, pool=executor.pool.index, evictions=evictions, dropped=dropped)

    def give_back(self, executor: ExecutorState) -> None:
        """Undo `reserve`, if there was one."""
        executor.pool.give_back(_activations(executor))

    def will_free(self, executor: ExecutorState) -> bool:
        """Check whether memory of the pool is about to become free: from its executors, or from loads from it."""
        pool = executor.pool
        return bool(pool.loading or self._about_to_run(pool) or self._sources[pool.index]) or any(
            other.executing and other.pool is executor.pool for other in self.executors
        )

    def _about_to_run(self, pool: ModelPool) -> list[str]:
        """Return loaded experts of a pool whose batches have not begun yet."""
        batches = [x.batch for x in self.executors if x.pool is pool and x.batch is not None and not x.executing]
        return [batch.expert for batch in batches if pool.is_ready(batch.expert)]

    # -- eviction (paper section 4.3) --

    def _order(self, free: list[str], pool: ModelPool) -> list[str]:
        match self.policy.evict:
            case "lru":
                return free
            case "fifo":
                return first_in(free, pool.load_order)
            case "two_stage":
                return two_stage(free, pool.resident, self.graph, self._usage)
            case "queue_aware":
                users = [x for x in self.executors if x.pool is pool]
                return queue_aware(two_stage(free, pool.expected, self.graph, self._usage), _next_uses(users))

    def _host_order(self, free: list[str]) -> list[str]:
        if self.policy.evict != "queue_aware":
            return free
        return queue_aware(two_stage(free, set(), self.graph, self._usage), _next_uses(self.executors))

    @property
    def _usage(self) -> Mapping[str, float]:
        """Numbers by which experts leave: larger for experts that are used more."""
        return self.usage.scores if self.policy.learns_usage else self.graph.usage

    def profile(self, executor: ExecutorState, name: str) -> Profile:
        """The profile of an expert on an executor."""
        return self.profiles[self.graph.experts[name].architecture, executor.config.processor]


def missing_bytes(executor: ExecutorState, profile: Profile) -> int:
    """The bytes that one request takes beyond the executor's memory for activations."""
    limit = executor.config.activation_bytes
    return 0 if limit is None else max(profile.activations(1) - limit, 0)


def _saved_by_host(profile: Profile) -> float:
    return max(profile.load_seconds("disk") - profile.load_seconds("host"), 0.0)


def _joined(configs: list[ExecutorConfig]) -> ExecutorConfig:
    """The first executor with the memory of all that share its device."""
    first = configs[0]
    shared = sum(config.expert_bytes for config in configs if config.device == first.device)
    return dataclasses.replace(first, expert_bytes=shared)


def _activations(executor: ExecutorState) -> str:
    """The name under which a pool reserves memory for an executor's batch; no expert has it."""
    return f"\0{executor.index}"


def _next_uses(executors: Iterable[ExecutorState]) -> dict[str, int]:
    """Each queued expert's smallest index among the groups of an executor."""
    places: dict[str, int] = {}
    for executor in executors:
        for place_, name in enumerate(executor.queue.experts()):
            places[name] = min(place_, places.get(name, place_))
    return places
