"""Systems that really run: right answers whatever is loaded and evicted, and the loads that the simulator says."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxinfer
from jaxinfer import AsyncLLM, SamplingParams
from jaxinfer.compiled import Costs
from jaxinfer.evaluation.experts.replay import Recorder, Replayer
from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.evaluation.experts.workloads import draw_trace
from jaxinfer.experts.config import ExecutorOptions, ExpertConfig
from jaxinfer.experts.errors import ConfigError, InvalidInputError, LoadError, RoutingError
from jaxinfer.experts.execution import profiler
from jaxinfer.experts.execution.architectures import ArchitecturePrograms
from jaxinfer.experts.execution.loader import ExpertLoader
from jaxinfer.experts.opened import OpenedSystem
from jaxinfer.experts.scheduling import quarantine
from jaxinfer.experts.scheduling.policy import POLICIES, Policy
from jaxinfer.experts.system import IN_FLIGHT
from jaxinfer.serving.budget import BudgetError, Reservation
from jaxinfer.serving.errors import OverloadedError
from tests.experts.boards import (
    CLASSIFIERS,
    COSTS,
    SIZE,
    answers,
    architecture,
    config,
    expert_bytes,
    image,
    probabilities,
    save_classifiers,
    save_encoder,
)
from tests.tiny import save_tiny

OWNER = "System of experts"
ALONE = dataclasses.replace(COSTS, max_batch=1)
"""One program for each architecture."""


def check(board, name, value, result):
    """A classifier's answer is the model's own."""
    wanted = probabilities(board / name, value)
    np.testing.assert_allclose(result.stages[0].judgement.probabilities, wanted, atol=1e-5)
    assert result.stages[0].expert == name


def inputs(count, names=CLASSIFIERS, seed=0):
    rng = np.random.default_rng(seed)
    return [(str(rng.choice(names)), image(int(rng.integers(50)))) for _ in range(count)]


def test_answers_are_the_models_own(board, start):
    system = start(*CLASSIFIERS, "v0", "d0", "e0", slots=20, rules=[("c1", "defect", "d0")], costs=ALONE)
    value = image(3)
    for name in CLASSIFIERS:
        result = system.submit(name, value).result()
        check(board, name, value, result)
        assert result.stages[0].judgement.verdict == ("ok", "defect")[probabilities(board / name, value).argmax()]
    transformed = system.submit("v0", value).result()
    check(board, "v0", value, transformed)
    assert transformed.verdict == ("good", "bad", "ugly")[probabilities(board / "v0", value).argmax()]
    detection, truth = system.submit("d0", value).result().stages[0].judgement, answers(board / "d0", value)
    count = int(truth.count[0])
    assert len(detection.labels) == count > 0
    np.testing.assert_allclose(detection.scores, truth.scores[0, :count], rtol=1e-4)
    np.testing.assert_allclose(detection.boxes, truth.boxes[0, :count], atol=1e-2)
    vectors = [system.submit("e0", text).result().stages[0].judgement.vector for text in ("abc", [97, 98, 99], "xyz")]
    assert np.linalg.norm(vectors[0]) == pytest.approx(1, abs=1e-5)
    assert not np.allclose(vectors[0], vectors[2], atol=1e-3)
    # rules
    routed = system.submit("c1", value).result()
    assert [stage.expert for stage in routed.stages] == ["c1", "d0"]
    assert routed.verdict == detection.verdict
    assert routed.latency >= routed.stages[0].seconds


@pytest.mark.parametrize("mode", POLICIES)
def test_answers_stay_right_while_experts_come_and_go(board, start, mode):
    system = start(*CLASSIFIERS, mode=mode, slots=1, executors=2, host=2)
    given = inputs(60)
    for (name, value), result in zip(given, system.run(given), strict=True):
        check(board, name, value, result)
    assert system.stats().switches > 0
    assert system.stats().requests == 60


def test_experts_of_an_architecture_share_their_programs(board, start, tmp_path):
    """However many there are: one program for each batch size."""
    for number in range(40):
        shutil.copytree(board / "c0", tmp_path / "board" / f"c{number}")
    names = [f"c{number}" for number in range(40)]
    system = start(*names, folder=tmp_path / "board", slots=3, costs=dataclasses.replace(COSTS, max_batch=4))
    assert len(list(system.run([(name, image(0)) for name in names * 2]))) == 80
    assert system.opened.compiled == 3  # batches of 1, 2 and 4
    assert len({expert.architecture for expert in system.experts.values()}) == 1


def test_budgets_say_what_experts_take_and_could_give_back(start):
    system = start("c0", "c1", "c2", slots=2, executors=2, host=1)
    budget = system.budgets["the host"]
    list(system.run(inputs(20, names=("c0", "c1", "c2"))))
    experts, *others = [held for held in budget.holdings if held.owner == OWNER]
    sizes = [expert.bytes for expert in system.graph.experts.values()]
    assert [held.tenant for held in (experts, *others)] == ["experts", "host cache", "inputs that wait"]
    assert sum(held.bytes for held in (experts, *others)) <= budget.reserved <= budget.capacity
    assert experts.bytes == min(2 * max(sizes), sum(sizes)) * 2
    assert 0 < experts.offer.bytes <= experts.bytes
    assert experts.offer.seconds > 0
    assert others[0].offer.bytes == others[0].bytes, "it is empty"


def test_unused_experts_are_lent_and_come_back(board, start):
    """Others get the memory of all but one; once they give it back, the system has it again when it loads experts."""
    system = start("c0", "c1", "c2", slots=3)
    budget, size = system.budgets["the host"], expert_bytes(board / "c0")
    names, pool = ("c0", "c1", "c2"), system.scheduler.manager.pools[0]
    list(system.run(inputs(6, names=names)))
    (before,) = [held for held in budget.holdings if (held.owner, held.tenant) == (OWNER, "experts")]
    assert before.offer.bytes == before.bytes - size, "one always has room"
    other, capacity = Reservation("another"), budget.capacity
    try:
        budget.capacity = budget.reserved
        other.resize({(budget, "weights"): size + 1})
        assert budget.reserved == budget.capacity
        assert pool.budget == before.bytes - size - 1
        assert len(system._runner.loader._resident) == len(pool.resident) == 1
        for (name, value), result in zip(given := inputs(12, names=names), system.run(given), strict=True):
            check(board, name, value, result)
        with pytest.raises(BudgetError, match="evictable"):
            other.resize({(budget, "weights"): 3 * size})
        other.release()
        system._decider._lender._retry_at = 0.0
        while pool.budget < before.bytes:
            for (name, value), result in zip(given := inputs(6, names=names), system.run(given), strict=True):
                check(board, name, value, result)
        assert budget.reserved == budget.capacity
    finally:
        budget.capacity = capacity


@pytest.mark.slow
def test_experts_make_room_for_a_language_model(board, start, tmp_path):
    """Both go on: the model sleeps again, and the experts come back."""
    names = ("c0", "c1", "c2")
    system = start(*names, slots=3)
    budget, capacity = system.budgets["the host"], system.budgets["the host"].capacity
    options = {"max_batch": 1, "context": 32, "page_size": 8}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with AsyncLLM(save_tiny(tmp_path / "model"), asleep=True, **options) as llm:
        needed = llm.needed[budget]
        try:
            budget.capacity = budget.reserved + needed - expert_bytes(board / "c0") // 2
            list(system.run(inputs(6, names=names)))
            llm.wake_up()
            assert budget.reserved <= budget.capacity
            assert system.scheduler.manager.pools[0].budget < 3 * expert_bytes(board / "c0")
            answered = llm.submit("abc", params)
            for (name, value), result in zip(given := inputs(12, names=names), system.run(given), strict=True):
                check(board, name, value, result)
            assert len(answered.result(60).outputs[0].token_ids) == 4
            llm.sleep(level=0)
            system._decider._lender._retry_at = 0.0
            while not llm.reserved[budget] < needed:  # the system has asked for what it has lent
                list(system.run(inputs(6, names=names)))
        finally:
            budget.capacity = capacity


def test_an_event_loop(board, start):
    system = start(slots=2)

    async def judge():
        return await asyncio.gather(*(system.submit(name, value) for name, value in inputs(10)))

    for (name, value), result in zip(inputs(10), asyncio.run(judge()), strict=True):
        check(board, name, value, result)


def test_inputs_that_cannot_be_are_refused_at_once(start):
    system = start("c0", "e0", slots=20)
    with pytest.raises(RoutingError, match="unknown kind of input 'c7'; known: c0, e0"):
        system.submit("c7", image(0))
    for bad in (image(0)[:-1], image(0).astype(np.float32), np.full((32, 32, 3), np.nan)):
        with pytest.raises(InvalidInputError, match="an image must be uint8"):
            system.submit("c0", bad)
    with pytest.raises(InvalidInputError, match="1 to 12 integers"):
        system.submit("e0", list(range(1, 14)))
    with pytest.raises(InvalidInputError, match="half of a surrogate pair"):
        system.submit("e0", "\ud800")
    with pytest.raises(InvalidInputError, match="the value must be an array"):
        system.submit("e0", [[1], [2, 3]])
    for kind in (None, 5, ["c0"], {"c0": 1}):
        with pytest.raises(InvalidInputError, match="kind must be a string, got"):
            system.submit(kind, image(0))
    for deadline in (float("nan"), -1, "5", True, [1], 10**400):
        with pytest.raises(InvalidInputError, match="deadline must be a finite number >= 0 or None, got"):
            system.submit("c0", image(0), deadline=deadline)
    for kind, bad, message in (
        ("c0", "nothing.png", "nothing.png: no such file"),
        ("c0", np.zeros((8, 8)), "an image must be uint8"),
        ("e0", image(0), "takes texts, not images"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            system.load_image(kind, bad)
    with pytest.raises(RoutingError, match="unknown kind of input 'c7'"):
        system.load_image("c7", image(0))
    assert system.stats().failed == 0
    assert len(list(system.run([("c0", system.load_image("c0", image(0)))]))) == 1
    with pytest.raises(InvalidInputError):
        list(system.run([("c0", image(0)), ("c0", None)]))
    bad = [("c0", None), ("c0", image(0)), ("c9", image(0)), (None, 5), ("c0", image(1))]
    found = [type(result).__name__ for result in system.run(bad, return_errors=True)]
    assert found == ["InvalidInputError", "Result", "RoutingError", "InvalidInputError", "Result"]


def test_a_run_waits_where_too_many_would(board, start):
    system = start(*CLASSIFIERS, max_waiting=3)
    given = inputs(50)
    for (name, value), result in zip(given, system.run(iter(given)), strict=True):
        check(board, name, value, result)


def test_statistics_show_the_usage_of_experts(start):
    system = start("c0", "c1", "c2")
    list(system.run(inputs(20, names=("c2",))))
    assert system.stats().usage["c2"] > 0.4 > system.stats().usage["c1"] > 0.2
    assert system.graph.usage["c2"] == pytest.approx(1 / 3)


def test_inputs_that_wait_are_bounded_and_reserved(board, start):
    """As in a `Service`: 10,000 inputs by default, or as many as have 512 MiB; batches that run come on top."""

    def waiting(system):
        return {held.tenant: held.bytes for held in system.budgets["the host"].holdings if held.owner == OWNER}

    system = start("c0", "e0", executors=2, slots=20)
    assert system.opened.max_waiting == 10_000
    assert waiting(system)["inputs that wait"] == (10_000 + 2 * 2) * SIZE * SIZE * 3
    system.close()
    assert not system.budgets
    system = start("e0", max_waiting=7, slots=20)
    assert waiting(system)["inputs that wait"] == (7 + 2) * 12 * 4  # token ids, int32
    large = ExpertConfig(name="c0", checkpoint=board / "c0", image_size=(4096, 4096))
    assert start("c0", experts=(large,)).opened.max_waiting == (512 << 20) // (4096 * 4096 * 3)


def test_more_inputs_than_may_wait_by_default_are_refused(start, gate, monkeypatch):
    monkeypatch.setattr("jaxinfer.serving.budget.WAITING_BYTES", 2 * SIZE * SIZE * 3)
    system = start("c0")

    def submit(number):
        try:
            return system.submit("c0", image(number))
        except OverloadedError as error:
            return error

    outcomes = [submit(number) for number in range(5)]  # two wait, and up to two are in the batch that has begun
    gate.set()
    refused = [outcome for outcome in outcomes if isinstance(outcome, OverloadedError)]
    assert 1 <= len(refused) <= 3
    assert all("2 requests wait, the limit is 2; try again in" in str(error) for error in refused)
    assert all(future.result(60).verdict for future in outcomes if future not in refused)


def test_inputs_that_wait_need_memory(start):
    with pytest.raises(ConfigError, match=r"inputs that wait .*: give .* less .*, or lower max_waiting"):
        start("c0", max_waiting=1 << 50)


@pytest.fixture
def gate(monkeypatch):
    """No batch runs before it is set: callbacks are then not called by who adds them."""
    gate, run = threading.Event(), ArchitecturePrograms.run

    def waits(*args):
        assert gate.wait(60)
        return run(*args)

    monkeypatch.setattr(ArchitecturePrograms, "run", waits)
    yield gate
    gate.set()


def test_a_callback_that_takes_long_holds_up_nobody(start, gate):
    system, go, slow = start("c0", "c1", executors=2, slots=2), threading.Event(), threading.Event()

    def wait(future):
        slow.set()
        go.wait(60)

    system.submit("c0", image(0)).add_done_callback(wait)
    gate.set()
    try:
        assert slow.wait(60)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(system.submit, "c1", image(0)).result(10).cancel()
    finally:
        go.set()


def test_a_callback_that_raises_harms_nobody(start, gate):
    system = start("c0")

    def interrupt(future):
        raise KeyboardInterrupt

    futures = [system.submit("c0", image(number)) for number in range(8)]
    for future in futures[::2]:
        future.add_done_callback(interrupt)
    gate.set()
    assert all(future.result(60).verdict for future in futures)
    assert system.submit("c0", image(0)).result(60).verdict


def test_a_deadline_that_no_lock_can_be_waited_for(start):
    system = start(*CLASSIFIERS)
    futures = [system.submit("c0", image(0), deadline=deadline) for deadline in (1e10, 1e30, 3e38)]
    assert all(future.result(60).verdict for future in futures)
    assert system.submit("c0", image(0)).result(60).verdict


LEFT = """
import sys, threading
from pathlib import Path
from jaxinfer.experts import System
from tests.experts.boards import AnyProfiles, config, image

system = System(config(Path(sys.argv[1]), ["c0", "c1"], slots=1), profiles=AnyProfiles())
futures = [system.submit(f"c{number % 2}", image(0)) for number in range(400)]
futures[0].result()
del system
print(len(threading.enumerate()) > 2)
"""


@pytest.mark.slow
def test_leaving_without_close_is_clean(board):
    command = [sys.executable, "-c", LEFT, str(board)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_run_takes_inputs_as_it_gives_results(start):
    system, taken = start(*CLASSIFIERS), itertools.count()
    results = system.run((next(taken), ("c0", image(0)))[1] for _ in itertools.repeat(None))
    assert [type(result).__name__ for result in itertools.islice(results, 1100)] == ["Result"] * 1100
    results.close()
    assert next(taken) <= 1100 + IN_FLIGHT


def test_an_input_that_changes_after_it_was_given_changes_nothing(start):
    system, given = start("c0", "e0", slots=20), image(0)
    ids = np.arange(12, dtype=np.int32)
    for name, value in (("c0", given), ("e0", ids)):
        assert not np.shares_memory(system.experts[name].kind.check(value), value)


# Configs that cannot work


def encoders(board, folder):
    """e0, and one of its size with another vocabulary."""
    shutil.copytree(board / "e0", folder / "e0")
    save_encoder(folder / "e1", vocab=300)
    return folder


def test_configs_that_cannot_work(board, start, tmp_path):
    save_classifiers([tmp_path / "larger"], size=64)
    shutil.copytree(board / "c0", tmp_path / "c0")
    for error, message, changes in (
        (ConfigError, "there is no device 'tpu:0'; here: cpu:0", {"device": "tpu:0"}),
        (ConfigError, "there is no device 'cpu:99'", {"device": "cpu:99"}),
        (ConfigError, "there is no device 'cpu:x'", {"device": "cpu:x"}),
        (ConfigError, "there is no device 'cpu:-1'", {"device": "cpu:-1"}),
        (ConfigError, "the largest pool has 7", {"expert_memory": 7}),
        (ConfigError, "expert_memory must be an integer >= 1", {"expert_memory": 0}),
    ):
        with pytest.raises(error, match=message):
            start("c0", executors_given=(ExecutorOptions(**{"name": "x", "expert_memory": 10**6, **changes}),))
    with pytest.raises(ConfigError, match=r"'c0' takes images of \[32, 32, 3\], and 'larger' images of \[64, 64, 3\]"):
        start("c0", "larger", folder=tmp_path, rules=[("c0", "ok", "larger")])
    for name, verdict, known in (("c0", "OK", "'ok', 'defect'"), ("e0", "ok", "'done'"), ("d0", "", "'none'")):
        with pytest.raises(ConfigError, match=f"rule '{name}': it never answers '{verdict}'; .*{known}"):
            start("c1", name, rules=[(name, verdict, "c1")])
    with pytest.raises(ConfigError, match=r"'e0' takes 12 token ids .*, and 'e1' 12 token ids \(vocabulary 300\)"):
        start("e0", "e1", folder=encoders(board, tmp_path), memory=10**6, rules=[("e0", "done", "e1")])
    with pytest.raises(
        ConfigError, match=r"System .* more of the host .*activations .* the system has .* free: give executors and"
    ):
        start("c0", "c1", activation=10**15)
    with pytest.raises(ConfigError, match=r"executors: two have the name 'x0'"):
        start("c0", executors_given=(ExecutorOptions(name="x0", expert_memory=10**6),) * 2)
    with pytest.raises(ConfigError, match="the rules make a cycle"):
        start("c0", "c1", rules=[("c0", "ok", "c1"), ("c1", "ok", "c0")])
    with pytest.raises(RoutingError, match="'c9', which is no expert"):
        start("c0", rules=[("c0", "ok", "c9")])
    with pytest.raises(LoadError, match=r"no expert can be opened; the first: .*none"):
        start("c0", folder=tmp_path / "none", memory=10**6)


# Experts that are missing or damaged


def test_a_missing_expert_is_the_only_one_that_fails(board, start, tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "FIRST_BACK_OFF", 0.01)
    shutil.copytree(board / "c1", tmp_path / "c1")
    system = start("c0", "c1", folder=tmp_path, memory=10**6, rules=[("c1", "defect", "c0")])
    assert list(system.broken) == ["c0"]
    with pytest.raises(LoadError, match="c0"):
        system.submit("c0", image(0))
    with pytest.raises(LoadError, match="c0"):  # c1 finds a defect and has c0 look
        system.submit("c1", image(0)).result()
    shutil.copytree(board / "c0", tmp_path / "c0")
    time.sleep(0.02)
    check(board, "c0", image(0), system.submit("c0", image(0)).result())


def test_an_expert_that_comes_late_is_what_it_is(board, start, tmp_path, monkeypatch):
    """A detector that is missing at the start, in a system that has others of its kind; said beforehand, or not."""
    monkeypatch.setattr(quarantine, "FIRST_BACK_OFF", 0.01)
    for name in ("c0", "d0"):
        shutil.copytree(board / name, tmp_path / name)
    shutil.copytree(board / "d0", tmp_path / "spare")
    for like in (None, "d0"):
        shutil.rmtree(tmp_path / "d1", ignore_errors=True)
        experts = [ExpertConfig(name=name, checkpoint=tmp_path / name) for name in ("c0", "d0")]
        experts.append(ExpertConfig(name="d1", checkpoint=tmp_path / "d1", like=like))
        rules = [("c0", verdict, "d1") for verdict in ("ok", "defect")]
        system = start(
            "c0", "d0", "d1", folder=tmp_path, experts=tuple(experts), memory=10**7, rules=rules, costs=ALONE
        )
        assert list(system.broken) == ["d1"]
        shutil.copytree(tmp_path / "spare", tmp_path / "d1")
        if like is None:
            with pytest.raises(LoadError, match=r"was taken to be a classifier.*, and is a detector"):
                system.submit("c0", image(0)).result()
            time.sleep(0.02)
        found = system.submit("c0", image(0)).result()
        assert [stage.expert for stage in found.stages] == ["c0", "d1"]
        assert system.graph.experts["d1"].bytes == system.graph.experts["d0"].bytes
        assert not system.broken


READ_ONLY = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
exec "$2" -c "$3" "$1"
"""
RUN_EXPERT = """
import pathlib, sys
from tests.experts.boards import AnyProfiles, config, image
from jaxinfer.experts import System
with System(config(pathlib.Path(sys.argv[1]), ["c0"]), profiles=AnyProfiles()) as system:
    print(system.broken, next(system.run([("c0", image(0))])).verdict)
"""


@pytest.mark.slow
def test_a_model_directory_that_may_not_be_written_to(board, tmp_path):
    shutil.copytree(board / "c0", tmp_path / "models" / "c0", ignore=shutil.ignore_patterns("layers-*"))
    namespace = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "mount", "--bind", tmp_path, tmp_path], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    done = subprocess.run(
        [*namespace, "bash", "-c", READ_ONLY, "-", tmp_path / "models", sys.executable, RUN_EXPERT],
        env=os.environ | {"JAXINFER_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[0] == "{}", done.stderr
    assert done.stdout.split()[1] in ("ok", "defect")
    assert list((tmp_path / "cache" / "experts").glob("layers-*/layer-00000.bin"))


# The simulator's schedule, and recorded ones


@pytest.mark.parametrize("mode", ["best", "paper", "parallel"])
def test_loads_are_those_of_the_simulation(start, mode):
    """The same trace on the simulated clock, once with every load and every batch really done."""
    rules = [("c0", "ok", "c4"), ("c1", "defect", "c4")]
    system = start(*CLASSIFIERS, mode=mode, executors=2, slots=1, host=1, rules=rules)
    trace = draw_trace(system.graph, 80, interval=1e-3)
    alone = system.opened.make_scheduler(system.profiles)
    alone.manager.place()
    wanted = Simulator(alone).run(trace)
    found = Simulator(system.scheduler, act=system.run_now).run(trace)
    assert found.statistics == wanted.statistics
    assert found.latencies == wanted.latencies
    assert found.statistics.switches > 5


def test_a_replay_does_the_same(board, start):
    given, modes = inputs(40), {"mode": "paper", "executors": 2, "slots": 1}
    with pytest.raises(ConfigError, match="without prefetch and shared pools"):
        start(mode="best", scheduler_type=Recorder)
    first = start(**modes, scheduler_type=Recorder)
    list(first.run(given))
    replay = functools.partial(Replayer, recording=first.scheduler.recording)
    second = start(**modes, scheduler_type=replay)
    for (name, value), result in zip(given, second.run(given), strict=True):
        check(board, name, value, result)
    assert second.stats().loads == first.stats().loads
    assert second.stats().batches == first.stats().batches


# Measuring


def test_costs_are_measured_before_anything_runs(board):
    opened = OpenedSystem(config(board, ["c0", "c1", "e0"], slots=10, max_batch=2))
    found = opened.measured()
    names = {architecture(board / name).name for name in ("c0", "e0")}
    assert {name for name, _ in found} == names
    for measured in found.values():
        profile = measured.profile
        assert profile.k > 0 <= profile.b
        assert profile.load["disk"] > 0 < profile.load["host"]
        assert profile.max_batch in (1, 2)
        assert measured.workspace[1] > 0
    assert not any(thread.name.startswith("jaxinfer-executor") for thread in threading.enumerate())


def test_costs_are_of_a_disk(board, monkeypatch):
    """The same expert on another disk is measured anew."""
    opened = OpenedSystem(config(board, ["c0"]))
    monkeypatch.setattr(profiler, "_run", lambda *_, **__: pytest.fail("measured"))
    keys = []
    monkeypatch.setattr(Costs, "open", lambda **options: keys.append(options["model"]) or Costs.fixed({}))
    for disk in ("1", "2"):
        monkeypatch.setattr(ExpertLoader, "disk", lambda self, name, disk=disk: disk)
        with pytest.raises(pytest.fail.Exception, match="measured"):
            opened.measured()
    assert [key["disk"] for key in keys] == ["1", "2"]


def test_what_loads_and_batches_take_is_followed(board, start):
    """Costs that were given are far too high: they come down to what is seen."""
    costs = dataclasses.replace(COSTS, k=100.0, latency={}, load={"disk": 1e3, "host": 1e3})
    system = start(*CLASSIFIERS, slots=2, mode="paper", costs=costs)
    list(system.run(inputs(60)))
    key = architecture(board / "c0").name, "cpu"
    assert 0 < system.profiles[key].load["disk"] < 100.0
    assert 0 < system.profiles[key].k < 10.0
    assert system.scheduler.profiles[key] is system.profiles[key]


def test_public_names():
    for name in jaxinfer.experts.__all__:
        assert getattr(jaxinfer.experts, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Systems'"):
        _ = jaxinfer.experts.Systems


# Whatever the policy


class Probe:
    """Looks at the bytes that are really in the pools, after every load."""

    def __init__(self, system):
        self.system, self.worst = system, 0.0
        loader = system._runner.loader
        prepare = loader.prepare

        def probed(load, *given):
            run = prepare(load, *given)

            def then():
                run()
                self.look(loader)

            return then

        loader.prepare = probed

    def look(self, loader):
        used = dict.fromkeys(range(len(self.system.scheduler.manager.pools)), 0)
        for (pool, _), fetch in list(loader._resident.items()):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another thread gives it back meanwhile
                used[pool] += sum(leaf.nbytes for leaf in fetch.settle())
        for pool, count in used.items():
            self.worst = max(self.worst, count / self.system.scheduler.manager.pools[pool].budget)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.builds(
        Policy,
        assign=st.sampled_from(["makespan", "round_robin"]),
        arrange=st.booleans(),
        evict=st.sampled_from(["two_stage", "queue_aware", "lru", "fifo"]),
        max_batch=st.sampled_from([None, 1]),
        one_executor=st.booleans(),
        host_cache=st.booleans(),
        share_pools=st.booleans(),
        prefetch=st.integers(0, 2),
    ),
    slots=st.integers(1, 3),
    host=st.integers(0, 3),
    seed=st.integers(0, 99),
    tight=st.booleans(),
)
def test_any_policy(board, start, policy, slots, host, seed, tight):
    """All futures end once with the right answer; no pool has more bytes than its budget.

    tight: a batch takes memory from experts, which make room for it.
    """
    costs = dataclasses.replace(COSTS, activation_bytes=2000)
    if tight:
        slots += 1
    system = start(
        policy=policy, slots=slots, host=host, executors=2, costs=costs, activation=1000 if tight else None,
        rules=[("c0", "ok", "c3")],
    )  # fmt: skip
    probe, ended, given = Probe(system), [], inputs(20, seed=seed)
    futures = [system.submit(name, value) for name, value in given]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: ended.append(number))
    for (name, value), future in zip(given, futures, strict=True):
        check(board, name, value, future.result(timeout=20))
    system.close()
    assert sorted(ended) == list(range(20))
    assert probe.worst <= 1
    for pool in system.scheduler.manager.pools:
        pool.check_integrity()
    assert not system.scheduler.queued
