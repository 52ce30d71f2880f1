"""Decisions one at a time: what begins, what goes wrong, and what each error says."""

import dataclasses

import pytest

from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.experts.errors import (
    ConfigError,
    ExecutorDiedError,
    InsufficientMemoryError,
    LoadError,
    ProfileError,
    RoutingError,
)
from jaxinfer.experts.scheduling.assignment import assign
from jaxinfer.experts.scheduling.policy import Policy, policy_of
from jaxinfer.experts.scheduling.quarantine import MAX_BACK_OFF
from jaxinfer.experts.scheduling.request import Batch, Evict, Load
from jaxinfer.experts.scheduling.scheduler import LIMITED, Scheduler
from jaxinfer.serving.errors import ClosedError, DeadlineExceededError, OverloadedError
from tests.experts.systems import CPU, GPU, cpu, expert, gpu, profiles, request, scheduler, shown, simulate, trace


def submit(system, experts, now=0.0):
    """Submit requests for these experts; returns them."""
    requests = [request(number, name, now) for number, name in enumerate(experts)]
    for each in requests:
        system.submit(each, now)
    return requests


def poll(system, now=0.0):
    return [shown(action) for action in system.poll(now)]


# -- what cannot be built --


@pytest.mark.parametrize(
    ("build", "error", "problem"),
    [
        (lambda: scheduler("a", gpu(1), a=expert("a", 11)), ConfigError, "takes 11 bytes and the largest pool has 10"),
        (lambda: scheduler("a", gpu(1), costs={}), ProfileError, "no profile of 'resnet' on gpu"),
        (lambda: scheduler("a", gpu(1), cpu(1), costs={("x", "gpu"): GPU}), ProfileError, "on cpu, gpu"),
        (
            lambda: scheduler("ab", gpu(1), a=expert("a", pinned=True)),
            ConfigError,
            "expert 'a' is pinned, and in whichever pool it stays, it leaves too little room for another expert",
        ),
        (
            lambda: scheduler(
                "a", gpu(2, activations=5), costs=profiles(dataclasses.replace(GPU, activation_bytes=16))
            ),
            ConfigError,
            "expert 'a' takes 10 bytes and one request at least 11 more than an executor has for activations",
        ),
        (lambda: gpu(0), ConfigError, "expert_bytes must be at least 1, got 0"),
        (lambda: gpu(1, activations=0), ConfigError, "activation_bytes must be at least 1"),
    ],
)
def test_refuses(build, error, problem):
    with pytest.raises(error, match=problem):
        build()


def test_refuses_to_have_no_executors():
    with pytest.raises(ConfigError, match="there are no executors"):
        Scheduler(scheduler("a").graph, profiles(), [], Policy())


def test_an_expert_goes_where_it_fits_and_there_are_costs():
    system = scheduler("ab", gpu(1), cpu(2), a=expert("a", 15), b=expert("b", 5))
    assert system.submit(request(0, "a"), 0) == 1
    only_gpu = scheduler("a", cpu(1), gpu(1), costs={("resnet", "gpu"): GPU}, placed=False)
    assert only_gpu.submit(request(0, "a"), 0) == 1


@pytest.mark.parametrize("mode", ["paper", "best", "none", "parallel"])
def test_requests_go_where_they_can_run_beside_pinned_experts(mode):
    """The first pool has room for "a" alone, which stays there: "b" and "c" run in the second."""
    system = scheduler("abc", gpu(1, device="0"), gpu(1, device="1"), policy=mode, a=expert("a", pinned=True))
    outcome, done = simulate(system, *"bcbcabca", every=3.0)
    assert outcome.finished == 8
    assert {x for what, name, x, _ in done if what == "batch" and name != "a"} == {1}


def test_requests_go_where_one_has_room_for_its_activations():
    small, enough = gpu(1, activations=1), gpu(1, activations=5)
    outcome, done = simulate(scheduler("ab", small, enough), *"abababab", every=0.1)
    assert outcome.finished == 8
    assert {x for what, _, x, _ in done if what == "batch"} == {1}


def test_a_pinned_expert_stays_in_one_pool_alone():
    """ "a" goes to the idle executor too, and leaves it again for "b"."""
    system = scheduler("ab", gpu(1, device="0"), gpu(1, device="1"), policy="none", a=expert("a", pinned=True))
    outcome, _ = simulate(system, *"aabbaabb")
    assert outcome.finished == 8
    assert system.manager.pools[0].resident == {"a"}


def test_experts_are_placed_where_they_can_run():
    system = scheduler("abcd", gpu(1), cpu(2), costs={("resnet", "gpu"): GPU})
    assert [sorted(pool.resident) for pool in system.manager.pools] == [["a"], []]


# -- what begins --


@pytest.fixture
def decisions(monkeypatch):
    """The totals, additions and choice of each assignment."""
    seen = []

    def assigned(totals, additions):
        seen.append((totals, additions, assign(totals, additions)))
        return seen[-1][-1]

    monkeypatch.setattr("jaxinfer.experts.scheduling.scheduler.assign", assigned)
    return seen


def test_an_executor_is_chosen_by_what_it_has_and_what_a_request_adds(decisions):
    submit(scheduler("abc", gpu(1), gpu(1)), "ac")
    assert decisions == [([0, 0], [3, 13], 0), ([3, 0], [13, 13], 1)]


def test_a_batch_takes_what_fits():
    """Of 7 with room for 3 there run 3, 3 and 1."""
    system = scheduler("a", gpu(1, activations=19))
    submit(system, "aaaaaaa")
    sizes = []
    while actions := system.poll(0):
        sizes.append(len(actions[0].requests))
        system.executed(actions[0], 0)
    assert sizes == [3, 3, 1]


@pytest.mark.parametrize(("activations", "size"), [(None, 3), (15, 3), (14, 2), (5, 1)])
def test_batches_keep_to_the_memory_for_activations(activations, size):
    system = scheduler("a", gpu(1, activations=activations))
    submit(system, "aaaa")
    assert poll(system) == [("batch", "a", 0, size)]


def test_the_running_batch_counts_and_cannot_be_joined(decisions):
    system = scheduler("a", gpu(1))
    submit(system, "a")
    poll(system)
    system.submit(request(1, "a", 1), 1.0)
    assert decisions[-1] == ([2.0], [3.0], 0)  # of 3 s one has passed; the first of a group again
    assert poll(system, 1.0) == []


def test_a_group_beyond_a_batch_costs_b_again_if_counted(decisions):
    submit(scheduler("a", gpu(1), policy=policy_of("paper", counts_batches=True)), "aaaa")
    assert [additions for _, additions, _ in decisions] == [[3], [1], [1], [3]]


def test_loads_evict_only_what_they_must():
    """Exact fit: "c" needs the room of "b" alone; there is one load at a time."""
    system = scheduler("abcd", gpu(2))
    submit(system, "cd")
    (load,) = system.poll(0)
    assert [eviction.expert for eviction in load.evictions] == ["b"]
    assert system.poll(1) == []
    assert system.loaded(load, 10) == []
    assert poll(system, 10) == [("batch", "c", 0, 1)]
    assert system.statistics.evictions == system.statistics.switches == 1


def test_an_exact_fit_evicts_nothing():
    system = scheduler("ab", gpu(2), placed=False)
    submit(system, "ab")
    for name in "ab":
        (load,) = system.poll(0)
        assert (load.expert, load.evictions) == (name, ())
        system.loaded(load, 0)
        (batch,) = system.poll(0)
        system.executed(batch, 0)


def test_pinned_experts_stay():
    system = scheduler("abcd", gpu(2), b=expert("b", pinned=True))
    for number, name in enumerate("cdcd"):
        system.submit(request(number, name), 0)
        (load,) = system.poll(0)
        assert [eviction.expert for eviction in load.evictions] != ["b"]
        system.loaded(load, 0)
        (batch,) = system.poll(0)
        system.executed(batch, 0)
    assert "b" in system.manager.pools[0].resident


def test_a_prefetch_keeps_what_is_needed_before():
    """Two slots: "a" runs, "b" is next; "c", which comes after, cannot be there yet."""
    system = scheduler("abc", gpu(2), policy=policy_of("paper", prefetch=2))
    submit(system, "abc")
    assert poll(system) == [("batch", "a", 0, 1)]


def test_a_waiting_batchs_expert_is_not_prefetched_away():
    """One pool for two: "c" came for the second executor; the first one runs and would load "d" ahead."""
    system = scheduler("abcd", gpu(1), gpu(1), policy=policy_of("none", share_pools=True, prefetch=1), placed=False)
    submit(system, "acd")  # a and d for the first, c for the second
    a, c = system.poll(0)
    system.loaded(a, 0)
    system.loaded(c, 0)
    assert poll(system) == [("batch", "a", 0, 1), ("batch", "c", 1, 1)]


def test_groups_whose_experts_are_there_run_first():
    """Unless what they overtake came too long before."""
    for max_age, order in ((None, "abc"), (1.0, "abc"), (0.5, "acb")):
        policy = policy_of("paper", resident_first=True, max_age=max_age)
        system = scheduler("abc", gpu(2), policy=policy)
        for second, name in enumerate("acb"):
            system.submit(request(second, name, float(second)), float(second))
        ran = ""
        while actions := system.poll(12.0):
            for action in actions:
                if isinstance(action, Load):
                    system.loaded(action, 12.0)
                else:
                    system.executed(action, 12.0)
                    ran += action.expert
        assert ran == order


def test_nothing_is_prefetched_while_enough_groups_can_run():
    policy = policy_of("paper", resident_first=True, prefetch=1)
    system = scheduler("abc", gpu(2), policy=policy)
    submit(system, "acb")
    assert poll(system) == [("batch", "a", 0, 1)]  # "b" comes next, and is there
    (only,) = [x.batch for x in system.executors]
    system.executed(only, 0)
    assert poll(system) == [("batch", "b", 0, 1), ("load", "c", 0, "disk")]


def test_executors_do_not_prefetch_each_others_experts_away():
    """Both run, each with a next expert, and there is room for one of these."""
    policy = policy_of("none", share_pools=True, prefetch=1)
    system = scheduler("abcd", gpu(1), gpu(2), policy=policy, placed=False)
    submit(system, "abcd")
    for load in system.poll(0):
        system.loaded(load, 0)
    a, load, b = system.poll(0)
    assert (a.expert, load.expert, b.expert) == ("a", "c", "b")
    system.loaded(load, 1)
    assert poll(system, 1) == []  # "d" would need the room of "c"


# -- activations --


def test_experts_leave_for_a_requests_activations():
    """One request needs 5 bytes more than there are beside the experts: "b" leaves, "a", which will run, does not."""
    system = scheduler("ab", gpu(2, activations=5), costs=profiles(dataclasses.replace(GPU, activation_bytes=10)))
    submit(system, "aa")
    evict, batch = system.poll(0)
    assert isinstance(evict, Evict)
    assert [eviction.expert for eviction in evict.evictions] == ["b"]
    assert shown(batch) == ("batch", "a", 0, 1)
    system.executed(batch, 3)
    assert system.manager.pools[0].free == 10
    assert [action[0] for action in poll(system, 3)] == ["batch"]


def test_the_expert_that_will_run_does_not_leave_for_its_own_activations():
    """ "b" is used least and would leave first."""
    system = scheduler("ab", gpu(2, activations=5), costs=profiles(dataclasses.replace(GPU, activation_bytes=10)))
    submit(system, "b")
    assert poll(system) == [("evict", "a"), ("batch", "b", 0, 1)]


@pytest.mark.parametrize("workspace", [{}, {1: 5, 2: 12, 4: 16}])
def test_padding_counts(workspace):
    """3 requests run as 4, which take 20 bytes, or 16 as measured: there is room for 2."""
    costs = dataclasses.replace(GPU, max_batch=4, latency={1: 3, 2: 4, 4: 6}, workspace=workspace)
    system = scheduler("a", gpu(1, activations=15), costs=profiles(costs))
    submit(system, "aaa")
    assert poll(system) == [("batch", "a", 0, 2)]


def test_activations_wait_for_others_that_share_the_pool():
    """Of 20 bytes "a" takes 10, and one batch at a time 10 for its activations."""
    costs = profiles(dataclasses.replace(GPU, activation_bytes=15, max_batch=1))
    shared = policy_of("none", share_pools=True)
    system = scheduler("ab", gpu(1, activations=5), gpu(1, activations=5), costs=costs, policy=shared)
    submit(system, "aa")
    evict, batch = system.poll(0)
    assert (shown(evict), shown(batch)) == (("evict", "b"), ("batch", "a", 0, 1))
    system.executed(batch, 3)
    assert poll(system, 3) == [("batch", "a", 1, 1)]


# -- what is refused --


def test_unknown_experts_are_refused():
    with pytest.raises(RoutingError, match="there is no expert 'z'"):
        scheduler("ab").submit(request(0, "z"), 0)


def test_a_full_queue_says_when_to_come_again():
    system = scheduler("a", gpu(1), options={"max_waiting": 2})
    submit(system, "aa")
    with pytest.raises(OverloadedError, match="2 requests wait, the limit is 2") as error:
        system.submit(request(2, "a"), 0)
    assert error.value.retry_after == 4.0
    system.submit(request(0, "a", stage=1), 0)  # what has begun goes on
    assert system.queued == 3


def test_a_full_queue_without_executors():
    system = scheduler("a", gpu(1), options={"max_waiting": 0})
    system.remove_executor(0, 0)
    with pytest.raises((OverloadedError, ExecutorDiedError)):
        system.submit(request(0, "a"), 0)


def test_deadlines():
    """Only requests that have not begun by their deadline end, before anything is loaded for them."""
    system = scheduler("ab", gpu(1))
    late, early = request(0, "b", deadline=5.0), request(1, "a", deadline=5.0)
    for each in (early, late):
        system.submit(each, 0)
    (batch,) = system.poll(5)
    assert batch.requests == [early]
    system.executed(batch, 6)
    (failure,) = system.poll(6)
    assert failure.request is late
    assert isinstance(failure.error, DeadlineExceededError)
    assert system.statistics.switches == 0


def test_a_deadline_ends_a_request_wherever_it_stands():
    """Behind others, and in a batch that waits for its expert: neither is loaded, or run, for nothing."""
    system = scheduler("abc", gpu(1), policy="best")
    system.submit(request(0, "a"), 0)
    system.submit(request(1, "b", deadline=1.0), 0)
    assert system.next_deadline == 1.0
    assert poll(system) == [("batch", "a", 0, 1)]
    assert [shown(action)[3] for action in system.poll(1.5)] == [1]
    waiting = scheduler("ab", gpu(1))
    waiting.submit(request(0, "b", deadline=5.0), 0)
    (load,) = waiting.poll(0)
    assert [shown(action)[3] for action in waiting.poll(6)] == [0]
    assert waiting.loaded(load, 10) == []
    assert poll(waiting, 10) == []
    assert waiting.next_deadline is None


@pytest.mark.parametrize(
    ("by_deadline", "deadline", "order"),
    [
        (True, 14.0, "cab"),  # in its turn it would begin at 26, and after "a" run until 16
        (True, 40.0, "abc"),  # which is early enough
        (True, 3.0, "ab"),  # cannot be kept: it ends
        (False, 14.0, "ab"),
    ],
)
def test_a_deadline_goes_first_where_that_helps(by_deadline, deadline, order):
    system = scheduler("abcd", gpu(1), policy=policy_of("paper", by_deadline=by_deadline))
    for number, name in enumerate("abc"):
        system.submit(request(number, name, deadline=deadline if name == "c" else None), 0)
    now, ran = 0.0, ""
    while system.queued or any(x.batch for x in system.executors):
        for action in system.poll(now):
            if isinstance(action, Load):
                now += 10.0
                system.loaded(action, now)
            elif isinstance(action, Batch):
                now += 3.0
                system.executed(action, now)
                ran += action.expert
    assert ran == order


@pytest.mark.parametrize("deadlines", [(None, 20.0), (20.0, None), (50.0, 20.0)])
def test_the_earliest_deadline_of_a_group_counts(deadlines):
    """Thirty requests for "a" take 90 s; of those for "b" one must begin within 20 s."""
    system = scheduler("ab", gpu(2), policy=policy_of("paper", by_deadline=True))
    submit(system, "a" * 30)
    for number, deadline in enumerate(deadlines, 30):
        system.submit(request(number, "b", deadline=deadline), 0)
    (load,) = system.poll(0)
    assert load.expert == "b"


def test_what_is_urgent_goes_first_in_its_group():
    costs = profiles(dataclasses.replace(GPU, max_batch=2))
    system = scheduler("a", gpu(1), policy=policy_of("paper", by_deadline=True), costs=costs)
    submit(system, "aaaa")
    system.submit(request(4, "a", deadline=5.0), 0)
    (batch,) = system.poll(0)
    assert [each.id for each in batch.requests] == [4, 0]
    system.executed(batch, 2.0)
    assert [each.id for each in system.poll(2.0)[0].requests] == [1, 2]


def test_urgent_requests_do_not_hold_up_others_for_ever():
    """ "b" has no deadline; what is urgent and came more than 10 s after it has to wait for it."""
    for arrival, order in ((9.0, "cb"), (11.0, "bc")):
        system = scheduler("abcd", gpu(1), policy=policy_of("paper", by_deadline=True, max_age=10.0))
        system.submit(request(0, "b", 0.0), 0.0)
        system.submit(request(1, "c", arrival, deadline=arrival + 20.0), arrival)
        assert system.poll(arrival)[0].expert == order[0]


def test_far_deadlines_of_what_has_ended_are_forgotten():
    system = scheduler("a", gpu(1))
    for number in range(1000):
        system.submit(request(number, "a", number, deadline=1e30), number)
        (batch,) = system.poll(number)
        system.executed(batch, number)
    assert len(system._deadlines) < 200
    system.submit(request(2000, "a", 1000.0, deadline=1e3), 1000.0)
    assert system.next_deadline == 1e3


def test_a_cold_expert_does_not_wait_behind_a_stream_of_hot_ones():
    """With more of "a" than can run, "b", which has to be loaded, lets those of `max_age` go before it, and no more."""
    policy = policy_of("best", max_age=10.0)
    system = scheduler("ab", gpu(1), policy=policy, costs=profiles(dataclasses.replace(GPU, max_batch=1)))
    outcome = Simulator(system).run(trace(*["a"] * 20, "b", *["a"] * 200, every=0.5))
    assert outcome.latencies[20] <= (40 + 1) * 3 - 20 * 0.5 + 10 + 3


def test_cancelling():
    system = scheduler("ab")
    first, second = submit(system, "ab")
    system.poll(0)
    assert not system.cancel(first)
    assert system.cancel(second)
    assert not system.cancel(second)
    assert system.queued == 0


def test_draining():
    system = scheduler("ab")
    submit(system, "abb")
    system.poll(0)
    failures = system.drain(ClosedError("closed"))
    assert [failure.request.expert for failure in failures] == ["b", "b"]
    assert system.queued == 0


# -- experts that cannot be loaded --


def load_of(system, name, now):
    system.submit(request(0, name, now), now)
    (load,) = system.poll(now)
    assert isinstance(load, Load)
    return load


def test_a_failed_load_ends_only_its_experts_requests():
    system = scheduler("abc", gpu(1))
    submit(system, "bcbb")
    (load,) = system.poll(0)
    failures = system.loaded(load, 1, OSError("torn file"))
    assert sorted(failure.request.id for failure in failures) == [0, 2, 3]
    assert all(isinstance(failure.error, LoadError) for failure in failures)
    assert "expert 'b' cannot be loaded: torn file" in str(failures[0].error)
    assert system.manager.pools[0].used == 0
    (load,) = system.poll(1)
    assert load.expert == "c"


def test_quarantine_backs_off_and_ends():
    system = scheduler("ab", gpu(1))
    now = 0.0
    for back_off in (1.0, 2.0, 4.0):
        system.loaded(load_of(system, "b", now), now, OSError("torn file"))
        with pytest.raises(LoadError, match=f"is tried again in {back_off / 2:.1f} s: torn file"):
            system.submit(request(1, "b"), now + back_off / 2)
        system.submit(request(2, "a"), now)
        system.cancel(next(iter(system.executors[0].queue)))
        now += back_off
    load = load_of(system, "b", now)
    assert system.loaded(load, now) == []
    (batch,) = system.poll(now)
    system.executed(batch, now)
    system.loaded(load_of(system, "a", now), now)
    (batch,) = system.poll(now)
    system.executed(batch, now)
    system.loaded(load_of(system, "b", now), now, OSError("torn file"))  # the first failure again
    with pytest.raises(LoadError, match=r"in 1\.0 s"):
        system.submit(request(1, "b"), now)


def test_back_off_has_a_limit_and_can_be_ended():
    system, now = scheduler("ab", gpu(1)), 0.0
    for _ in range(20):
        system.loaded(load_of(system, "b", now), now, OSError("torn file"))
        with pytest.raises(LoadError, match="is tried again in"):
            system.submit(request(1, "b"), now + 0.5)
        now += MAX_BACK_OFF
    load_of(system, "b", now)
    again = scheduler("ab", gpu(1))
    again.loaded(load_of(again, "b", 0), 0, OSError("torn file"))
    again.retry("b")
    assert isinstance(load_of(again, "b", 0), Load)


def test_a_failed_load_concerns_one_pool():
    """The first executor has "a", and serves it; the second cannot load it."""
    system = scheduler("abc", gpu(1, device="0"), gpu(1, device="1"), policy="none")
    submit(system, "aaaa")
    batch, load = system.poll(0)
    assert (batch.executor, load.executor, load.expert) == (0, 1, "a")
    assert system.loaded(load, 1, OSError("torn file")) == []
    assert [request.id for request in system.executors[0].queue] == [1, 3]
    system.submit(request(4, "a"), 1)
    assert len(system.executors[0].queue) == 3


def test_a_load_without_memory_is_tried_again_with_others_gone():
    system = scheduler("abc", gpu(3), placed=False)
    for name in "ab":
        system.loaded(load_of(system, name, 0), 0)
        (batch,) = system.poll(0)
        system.executed(batch, 0)
    load = load_of(system, "c", 0)
    assert load.evictions == ()
    assert system.loaded(load, 0, InsufficientMemoryError("RESOURCE_EXHAUSTED")) == []
    (again,) = system.poll(0)
    assert [eviction.expert for eviction in again.evictions] == ["b"]
    assert system.loaded(again, 0) == []
    (batch,) = system.poll(0)
    system.executed(batch, 0)
    system.loaded(load_of(system, "b", LIMITED), LIMITED)  # what was given is tried again
    assert system.manager.pools[0].resident == {"a", "b", "c"}


def test_a_load_without_memory_fails_where_nothing_can_leave():
    system = scheduler("ab", gpu(2), placed=False)
    (failure,) = system.loaded(load_of(system, "a", 0), 0, InsufficientMemoryError("RESOURCE_EXHAUSTED"))
    assert isinstance(failure.error, LoadError)
    with pytest.raises(LoadError, match=r"is tried again in 1\.0 s: RESOURCE_EXHAUSTED"):
        system.submit(request(1, "a"), 0)


def test_a_failed_prefetch_leaves_the_running_batch_alone():
    system = scheduler("abc", gpu(2), policy=policy_of("paper", prefetch=1))
    submit(system, "ac")
    batch, load = system.poll(0)
    assert load.prefetched
    (failure,) = system.loaded(load, 1, OSError("torn file"))
    assert failure.request.expert == "c"
    assert system.executed(batch, 3) == []
    assert poll(system, 3) == []


def test_a_host_copy_goes_to_one_pool():
    """The other one reads the file."""
    policy = policy_of("none", host_cache=True)
    system = scheduler("abc", gpu(1), gpu(1), policy=policy, options={"host_bytes": 100})
    submit(system, "ccaa")
    first, second = system.poll(0)  # "a" and "b" leave for "c"
    for load in (first, second):
        system.loaded(load, 0)
    for batch in system.poll(0):
        system.executed(batch, 0)
    first, second = system.poll(0)
    assert [(load.expert, load.tier) for load in (first, second)] == [("a", "host"), ("a", "disk")]
    assert system.loaded(first, 1) == system.loaded(second, 1) == []
    assert poll(system, 1) == [("batch", "a", 0, 1), ("batch", "a", 1, 1)]


def test_a_failed_batch_ends_its_requests():
    system = scheduler("a", gpu(1))
    submit(system, "aa")
    (batch,) = system.poll(0)
    failures = system.executed(batch, 1, ValueError("bad"))
    assert [failure.request.id for failure in failures] == [0, 1]
    submit(system, "a", 1)
    assert poll(system, 1) == [("batch", "a", 0, 1)]


# -- executors that come and go --


def test_what_waits_for_a_dead_executor_goes_to_others_once():
    system = scheduler("a", gpu(1), gpu(1), gpu(1), policy="none", placed=False)
    submit(system, "aaaaaa")
    assert system.remove_executor(0, 0) == []
    assert sorted(r.id for x in system.executors for r in x.queue) == [0, 1, 2, 3, 4, 5]
    again = [r.id for r in system.executors[1].queue if r.requeued]
    failures = system.remove_executor(1, 0)
    assert [failure.request.id for failure in failures] == again != []
    assert all(isinstance(failure.error, ExecutorDiedError) for failure in failures)
    assert len(system.executors[2].queue) == 6 - len(again)


def test_a_dead_executors_batch_ends():
    system = scheduler("a", gpu(1), gpu(1), placed=True)
    submit(system, "aaaa")
    (batch,) = system.poll(0)
    failures = system.remove_executor(0, 1)
    assert [failure.request for failure in failures] == batch.requests
    assert all(isinstance(failure.error, ExecutorDiedError) for failure in failures)
    assert [r.id for r in system.executors[1].queue] == [3]
    (second,) = system.remove_executor(1, 1)
    assert second.request.id == 3
    assert "executor 'gpu' has ended, and no other one can take its request" in str(second.error)
    with pytest.raises(ExecutorDiedError, match="no executor that is left can run expert 'a'"):
        system.submit(request(9, "a"), 2)


def test_a_batch_that_waits_for_its_expert_is_given_to_others():
    system = scheduler("ab", gpu(1), placed=False)
    submit(system, "aa")
    (load,) = system.poll(0)
    system.manager.add_executor(gpu(1))
    assert system.remove_executor(0, 1) == []
    assert [r.id for r in system.executors[1].queue] == [0, 1]
    assert system.loaded(load, 2) == []  # its loader ends nevertheless
    assert poll(system, 2) == [("load", "a", 1, "disk")]


def test_executors_come_and_go_while_idle():
    system = scheduler("ab", gpu(1))
    assert system.manager.add_executor(gpu(1, name="second")) == 1
    assert system.remove_executor(0, 0) == []
    submit(system, "a")
    assert poll(system) == [("load", "a", 1, "disk")]


def test_the_pool_of_a_dead_executor_is_no_source():
    policy = policy_of("paper", host_cache=True)
    system = scheduler("ab", gpu(1), cpu(1), policy=policy, costs=profiles(cpu=CPU))
    system.remove_executor(1, 0)
    submit(system, "b")
    assert poll(system) == [("load", "b", 0, "disk")]


def test_an_expert_that_is_copied_elsewhere_is_waited_for():
    """The second pool has one expert, which the first one copies: its own request must not fail for that."""
    system = scheduler("abcd", cpu(1, device="a"), cpu(1, device="b"), policy="parallel")
    outcome, done = simulate(system, "b", "c", "d", "a", every=0.3)
    assert outcome.finished == 4
    assert done[0] == ("load", "b", 0, "host")
