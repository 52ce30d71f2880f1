"""Traces from end to end: what runs, what is loaded, and when it is done."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.experts.scheduling.policy import POLICIES, policy_of
from tests.experts.systems import CPU, GPU, cpu, gpu, profiles, scheduler, simulate, trace

MODES = pytest.mark.parametrize("mode", POLICIES)


@MODES
def test_no_request(mode):
    outcome, done = simulate(scheduler(policy=mode))
    assert (outcome.throughput, outcome.finished, outcome.seconds, done) == (0.0, 0, 0.0, [])


@MODES
def test_one_request_for_an_expert_that_is_there(mode):
    outcome, done = simulate(scheduler(policy=mode), "a")
    assert done == [("batch", "a", 0, 1)]
    assert (outcome.finished, outcome.seconds, outcome.latencies) == (1, 3.0, [3.0])
    assert outcome.throughput == pytest.approx(1 / 3)
    assert outcome.busy_seconds == 3.0


@MODES
def test_one_request_for_an_expert_that_is_not(mode):
    outcome, done = simulate(scheduler("abc", policy=mode, options={"host_bytes": 100}), "c")
    assert done == [("load", "c", 0, "disk"), ("batch", "c", 0, 1)]
    assert outcome.seconds == 13.0


@MODES
def test_everything_fits(mode):
    outcome, _ = simulate(scheduler("abc", gpu(3), policy=mode), *"abccbaabc", every=0.5)
    assert outcome.statistics.switches == outcome.statistics.evictions == 0
    assert outcome.finished == 9


@MODES
def test_one_expert_for_all(mode):
    outcome, done = simulate(scheduler("a", gpu(1), policy=mode), *"aaaaaaa")
    assert outcome.finished == 7
    sizes = [count for *_, count in done]
    assert sizes == ([3, 3, 1] if POLICIES[mode].max_batch is None else [1] * 7)


@MODES
def test_a_pool_of_one_slot(mode):
    outcome, _ = simulate(scheduler("abc", gpu(1), policy=mode), *"abcabc")
    assert outcome.finished == 6
    assert outcome.statistics.switches == (2 if POLICIES[mode].arrange else 5)


def test_arranged_requests_share_their_loads():
    """Groups in the order of their first requests; "a" is there, "c" is not."""
    outcome, done = simulate(scheduler("abc", gpu(1)), *"acaca")
    assert done == [("batch", "a", 0, 3), ("load", "c", 0, "disk"), ("batch", "c", 0, 2)]
    assert outcome.latencies == [5, 5 + 10 + 4, 5, 19, 5]


def test_requests_at_the_same_moment_run_in_the_order_of_their_numbers():
    system = scheduler("a", gpu(1), costs=profiles(dataclasses.replace(GPU, max_batch=1)))
    outcome, done = simulate(system, *"aaaa")
    assert [count for *_, count in done] == [1] * 4
    assert outcome.latencies == [3, 6, 9, 12]


def test_a_verdict_ends_an_input_or_leads_on():
    system = scheduler("abd", gpu(3), rules=["ad", "bd"])
    outcome, done = simulate(system, "ad", "a", "bd", every=0.1)
    assert outcome.finished == 3
    assert sum(count for what, _, _, count in done) == 5
    assert ("batch", "d", 0, 2) in done  # the detector that both share


def test_what_follows_comes_at_the_moment_its_queue_is_empty():
    outcome, done = simulate(scheduler("ad", gpu(2), rules=["ad"]), "ad")
    assert done == [("batch", "a", 0, 1), ("batch", "d", 0, 1)]
    assert outcome.latencies == [6]


def test_an_executor_with_the_expert_is_better_than_an_idle_one():
    """Both a batch beside "a" and a load on the idle executor end before the other work: the least addition wins."""
    _, done = simulate(scheduler("ab", gpu(1), gpu(1)), *"aabaa")
    assert not [action for action in done if action[0] == "load"]


def test_equal_costs_on_both_processors():
    """Nothing tells executors apart but their places."""
    system = scheduler("ab", gpu(2), cpu(2, 15), costs=profiles(cpu=GPU), placed=False)
    outcome, done = simulate(system, *"abab")
    assert outcome.finished == 4
    assert {executor for _, _, executor, _ in done} == {0, 1}


def test_one_load_from_disk_at_a_time():
    outcome, done = simulate(scheduler("abcd", gpu(1), gpu(1), policy="none"), "c", "d")
    assert [action[1] for action in done if action[0] == "load"] == ["c", "d"]
    assert outcome.latencies == [13, 23]


def test_a_slower_executor_is_used_where_it_ends_earlier():
    """The fourth "a" would end at 9 on the GPU behind others, and the CPU has "b"."""
    _, done = simulate(scheduler("ab", gpu(1), cpu(1)), *"aaabaaa")
    assert ("batch", "b", 1, 1) in done


def test_unknown_experts_end_their_inputs_alone():
    outcome, _ = simulate(scheduler("ab"), "a", "z", "b")
    assert (outcome.finished, outcome.failed) == (2, 1)


def test_prefetch_hides_a_load_behind_a_batch():
    """While the first of two groups runs for 5 s, the second one's expert comes; its load takes 10 s."""
    policy = policy_of("paper", prefetch=1)
    hidden, done = simulate(scheduler("abc", gpu(2), policy=policy), *"aaac")
    plain, _ = simulate(scheduler("abc", gpu(2)), *"aaac")
    assert done == [("batch", "a", 0, 3), ("load", "c", 0, "disk"), ("batch", "c", 0, 1)]
    assert plain.seconds - hidden.seconds == 5
    assert hidden.statistics.prefetched == 1


def test_the_host_cache_brings_back_what_left():
    policy = policy_of("paper", host_cache=True)
    system = scheduler("ab", gpu(1), policy=policy, options={"host_bytes": 20})
    outcome, done = simulate(system, "b", "a", "b", every=50)
    assert [action[-1] for action in done if action[0] == "load"] == ["disk", "host", "host"]
    assert dict(outcome.statistics.loads) == {"disk": 1, "host": 2}


def test_a_copy_in_a_cpus_pool_is_used():
    policy = policy_of("paper", host_cache=True)
    costs = profiles(cpu=dataclasses.replace(CPU, k=1000.0))
    _, done = simulate(scheduler("ab", gpu(1), cpu(1), policy=policy, costs=costs), "b", every=1)
    assert done[0] == ("load", "b", 0, "host")


def test_executors_that_share_a_pool_share_loads():
    policy = policy_of("none", share_pools=True)
    system = scheduler("abcd", gpu(1), gpu(1), policy=policy)
    assert len(system.manager.pools) == 1
    assert system.manager.pools[0].budget == 20
    outcome, done = simulate(system, *"cccc", every=0.1)
    assert [action[0] for action in done].count("load") == 1
    assert outcome.finished == 4


def test_batches_that_fit_a_compiled_size():
    """5 of 8 would be 37% padding: 4 and 1."""
    sizes = {1: 1.5, 2: 2.0, 4: 3.0, 8: 5.0}
    costs = profiles(dataclasses.replace(GPU, max_batch=8, latency=sizes))
    for policy, expected in (("paper", [5]), (policy_of("paper", avoids_padding=True), [4, 1])):
        system = scheduler("a", gpu(1, activations=40), costs=costs, policy=policy)
        _, done = simulate(system, *"aaaaa")
        assert [count for *_, count in done] == expected


def test_experts_that_make_room_for_a_batch_take_time():
    """ "b" leaves for the host's memory, in 4 s, before "a" runs for 3."""
    costs = dataclasses.replace(GPU, activation_bytes=10, evict=4.0)
    policy = policy_of("paper", host_cache=True)
    system = scheduler("ab", gpu(2, activations=5), costs=profiles(costs), policy=policy, options={"host_bytes": 10})
    outcome, done = simulate(system, "a")
    assert done == [("evict", "b"), ("batch", "a", 0, 1)]
    assert outcome.seconds == 7.0


def test_equal_traces_have_equal_outcomes():
    rng = np.random.default_rng(0)
    routes = ["abcdef"[n] for n in rng.integers(0, 6, 100)]
    for mode in POLICIES:
        outcomes, actions = zip(
            *(simulate(scheduler("abcdef", gpu(2), gpu(1), cpu(1), policy=mode), *routes, every=0.3) for _ in range(2)),
            strict=True,
        )
        assert actions[0] == actions[1]
        assert outcomes[0].latencies == outcomes[1].latencies


def test_decisions_are_timed():
    system = scheduler("ab")
    outcome = Simulator(system).run(trace(*"aab", every=1.0))
    assert len(outcome.decision_seconds) >= 3
    assert (outcome.decision_seconds > 0).all()
