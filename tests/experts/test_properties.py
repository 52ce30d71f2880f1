"""What holds for all systems, policies and traces, whatever fails: checked by a plain model of the memories."""

import contextlib
import dataclasses
import itertools
import random

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from jaxinfer.evaluation.experts.forecast import compulsory_loads
from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.errors import ConfigError, InsufficientMemoryError, LoadError
from jaxinfer.experts.scheduling.executor_state import ExecutorConfig
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo, InputKind, Rule
from jaxinfer.experts.scheduling.policy import POLICIES, Policy
from jaxinfer.experts.scheduling.profile import Profile
from jaxinfer.experts.scheduling.request import Batch, Evict, Load
from jaxinfer.experts.scheduling.scheduler import Scheduler

LARGEST = 30


@dataclasses.dataclass
class Case:
    """All that a run depends on."""

    graph: ExpertGraph
    profiles: dict
    executors: list
    policy: Policy
    host_bytes: int
    trace: list
    seed: int
    load_failures: float
    deaths: list  # of (second, executor)

    def run(self):
        model = Model(self)
        return model, Simulator(model.scheduler, act=model.act).run(self.trace)


class Faulty(Scheduler):
    """A scheduler that is told of failures; calls `check` after all that it is told."""

    def __init__(self, case, model):
        super().__init__(
            case.graph,
            case.profiles,
            case.executors,
            case.policy,
            host_bytes=case.host_bytes,
        )
        self._model, self._random = model, random.Random(case.seed)
        self._load_failures, self._deaths = case.load_failures, sorted(case.deaths)

    def _assign(self, request, expert, now):
        index = super()._assign(request, expert, now)
        self._model.assigned(request, index)
        return index

    def submit(self, request, now):
        try:
            return super().submit(request, now)
        finally:
            self._model.check()

    def loaded(self, load, now, error=None):
        failed = self._random.random() < self._load_failures
        self._model.loaded(load, failed)
        error = self._random.choice([LoadError("torn file"), InsufficientMemoryError("full")]) if failed else None
        failures = super().loaded(load, now, error)
        self._model.check()
        return failures

    def executed(self, batch, now, error=None):
        if not self.executors[batch.executor].alive:
            return []
        self._model.running.remove(batch)
        failures = super().executed(batch, now, error)
        self._model.check()
        return failures

    def poll(self, now):
        failures = []
        while self._deaths and self._deaths[0][0] <= now:
            executor = self.executors[self._deaths.pop(0)[1] % len(self.executors)]
            batch, executing = executor.batch, executor.executing
            failures += self.remove_executor(executor.index, now)
            if executing:
                self._model.running.remove(batch)
                batch.requests = []  # the simulator is told that it ends, and nothing comes of it
            self._model.check()
        actions = failures + super().poll(now)
        return actions


class Model:
    """What is in every memory, as someone who does what the scheduler says sees it."""

    def __init__(self, case):
        self.sizes = {name: expert.bytes for name, expert in case.graph.experts.items()}
        self.host_budget = case.host_bytes
        self.running, self.loading, self.host, self.done, self.log = [], [], set(), set(), []
        self.assignments = {}
        self.pools = {}
        self.scheduler = Faulty(case, self)
        self.pools = {index: set(names) for index, names in self.scheduler.manager.place().items()}
        self.at_start = set().union(*self.pools.values())
        self.last_run = {}
        self.used = set()

    def assigned(self, request, executor):
        self.assignments[request.id, request.stage, executor] = len(self.assignments)

    def act(self, action):
        assert len(self.log) < 5000, "never ends"
        self.log.append(str(action.__class__.__name__) + str(getattr(action, "expert", "")))
        match action:
            case Load():
                self.evict(action.pool, action.evictions, action.dropped)
                assert action.expert not in self.pools[action.pool], "loaded twice"
                if action.source is not None:
                    assert action.expert in self.pools[action.source]
                elif action.tier == "host":
                    self.host.remove(action.expert)
                self.pools[action.pool].add(action.expert)
                self.loading.append(action)
            case Evict():
                self.evict(action.pool, action.evictions, action.dropped)
            case Batch():
                self.run(action)
        self.check_bytes()

    def evict(self, pool, evictions, dropped):
        for name in dropped:
            self.host.remove(name)
        for eviction in evictions:
            name = eviction.expert
            assert not any(self.pool_of(batch.executor) == pool and batch.expert == name for batch in self.running)
            assert not any(pool in (load.pool, load.source) and load.expert == name for load in self.loading)
            self.pools[pool].remove(name)
            if eviction.to_host:
                self.host.add(name)

    def loaded(self, load, failed):
        self.loading.remove(load)
        if failed:
            self.pools[load.pool].remove(load.expert)

    def run(self, batch):
        pool = self.pool_of(batch.executor)
        assert batch.expert in self.pools[pool], "runs without its weights"
        assert not any(load.pool == pool and load.expert == batch.expert for load in self.loading)
        assert not any(other.executor == batch.executor for other in self.running), "two batches at once"
        assert batch.requests
        for request in batch.requests:
            assert request.expert == batch.expert
            assert (request.id, request.stage) not in self.done, "ran twice"
            self.done.add((request.id, request.stage))
            place = self.assignments[request.id, request.stage, batch.executor]
            assert place > self.last_run.get((batch.expert, batch.executor), -1), "overtaken within its expert"
            self.last_run[batch.expert, batch.executor] = place
        self.used.add(batch.expert)
        self.running.append(batch)

    def pool_of(self, executor):
        return self.scheduler.executors[executor].pool.index

    def check(self):
        for pool in self.scheduler.manager.pools:
            pool.check_integrity()

    def check_bytes(self):
        for index, names in self.pools.items():
            assert sum(self.sizes[name] for name in names) <= self.scheduler.manager.pools[index].budget
        on_its_way = [load.expert for load in self.loading if load.tier == "host" and load.source is None]
        assert sum(self.sizes[name] for name in [*self.host, *on_its_way]) <= self.host_budget


POLICY = st.sampled_from(sorted(POLICIES)).map(POLICIES.get) | st.builds(
    Policy,
    assign=st.sampled_from(["makespan", "round_robin"]),
    arrange=st.booleans(),
    evict=st.sampled_from(["two_stage", "queue_aware", "lru", "fifo"]),
    max_batch=st.sampled_from([None, 1, 2]),
    one_executor=st.booleans(),
    host_cache=st.booleans(),
    share_pools=st.booleans(),
    prefetch=st.integers(0, 3),
    resident_first=st.booleans(),
    counts_batches=st.booleans(),
    avoids_padding=st.booleans(),
    max_age=st.sampled_from([None, 0.5, 10.0]),
    by_deadline=st.booleans(),
)


@st.composite
def cases(draw, *, faulty):
    names = "abcdefgh"[: draw(st.integers(1, 8))]
    pinned = draw(st.booleans())
    experts = [
        ExpertInfo(
            name=name,
            architecture=draw(st.sampled_from(["small", "large"])),
            bytes=draw(st.integers(LARGEST // 3, LARGEST)),
            pinned=pinned and draw(st.integers(0, 3)) == 0,
        )
        for name in names
    ]
    pairs = [pair for pair in itertools.combinations(names, 2) if draw(st.integers(0, 4)) == 0]
    rules = [Rule(expert=a, verdict=b, next=b, probability=0.1) for a, b in pairs]
    graph = ExpertGraph(experts, [InputKind(name=name, expert=name, share=1 / len(names)) for name in names], rules)
    routes = [(name,) for name in names] + pairs
    profiles = {
        (architecture, processor): Profile(
            k=draw(st.sampled_from([0.5, 1.0])) * slower,
            b=draw(st.sampled_from([0.0, 1.0])),
            max_batch=draw(st.integers(1, 4)),
            load={"disk": draw(st.sampled_from([0.0, 3.0, 20.0])), "host": 0.5},
            activation_bytes=draw(st.sampled_from([0, 10])),
        )
        for architecture in ("small", "large")
        for processor, slower in (("gpu", 1), ("cpu", 8))
    }
    executors = [
        ExecutorConfig(
            name=str(place),
            processor=draw(st.sampled_from(["gpu", "cpu"])),
            device=draw(st.sampled_from(["0", "1"])),
            expert_bytes=draw(st.integers(LARGEST, 3 * LARGEST)) if draw(st.booleans()) or not place else LARGEST // 2,
            activation_bytes=draw(st.sampled_from([None, 5, 10, 30])),
        )
        for place in range(draw(st.integers(1, 4)))
    ]
    seed = draw(st.integers(0, 1000))
    rng, pauses = random.Random(seed), draw(st.sampled_from([[0.0], [0.0, 0.25], [0.25, 5.0], [20.0]]))
    number = draw(st.integers(0, 40))
    arrivals = itertools.accumulate((rng.choice(pauses) for _ in range(number)), initial=0.0)
    case = Case(
        graph=graph,
        profiles=profiles,
        executors=executors,
        policy=draw(POLICY),
        host_bytes=draw(st.sampled_from([0, 30, 100])),
        trace=[TraceRequest(arrival=at, experts=rng.choice(routes)) for at in itertools.islice(arrivals, number)],
        seed=seed,
        load_failures=draw(st.sampled_from([0.0, 0.0, 0.2])) if faulty else 0.0,
        deaths=draw(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3)), max_size=2)) if faulty else [],
    )
    with contextlib.suppress(ConfigError):
        Model(case)
        return case
    reject()


@settings(max_examples=150)
@given(cases(faulty=True))
def test_invariants(case):
    """The model checks memories and order; all inputs end once, and no load is saved that cannot be."""
    model, outcome = case.run()
    assert outcome.finished + outcome.failed == len(case.trace)
    assert outcome.statistics.switches >= compulsory_loads(model.used, model.at_start)
    assert model.scheduler.queued == 0
    assert not model.running
    assert not model.loading


@settings(max_examples=100)
@given(cases(faulty=False))
def test_all_are_served_where_nothing_fails(case):
    """What is accepted at the start can run: whatever is pinned, and however little there is for activations."""
    model, outcome = case.run()
    assert outcome.finished == len(case.trace)
    assert len(model.done) == sum(len(item.experts) for item in case.trace)


@settings(max_examples=30)
@given(cases(faulty=True))
def test_equal_cases_have_equal_runs(case):
    first, second = case.run(), case.run()
    assert first[0].log == second[0].log
    assert first[1].latencies == second[1].latencies
    assert first[1].statistics == second[1].statistics
