"""Models that sleep: they give memory back, keep requests waiting, and go on as if nothing had been."""

import asyncio
import contextlib
import dataclasses
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxinfer import AsyncLLM, Embedder, SamplingParams
from jaxinfer.checkpoints import CheckpointError
from jaxinfer.generation.execution import spares
from jaxinfer.models.files.conversion import convert
from jaxinfer.serving import ClosedError, DeadlineExceededError, NotLoadedError
from jaxinfer.serving.budget import BudgetError, host_budget
from jaxinfer.sharding import MeshConfig
from tests.generation.api.test_embedding import GOLDEN
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs
from tests.peft import random_pair, save_adapter
from tests.tiny import ONE_KIND, save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(model_dir, **options):
    with few_programs():
        return AsyncLLM(model_dir, **PLAIN | options)


@pytest.fixture(scope="module")
def expected(model_dir):
    with make(model_dir) as llm:
        return llm.submit("abc", GREEDY).result().outputs[0].token_ids


@pytest.fixture
def llm(model_dir):
    with make(model_dir, asleep=True) as llm:
        yield llm


def answer(llm):
    return llm.submit("abc", GREEDY).result(60).outputs[0].token_ids


def bytes_of(llm):
    return llm.reserved.total()


MESHES = [pytest.param(MeshConfig(**{axis: 2}), marks=pytest.mark.slow) for axis in ("tensor", "data")]


@pytest.mark.parametrize("mesh", [None, *MESHES], ids=str)
def test_tokens_are_the_same_after_sleep(model_dir, expected, mesh):
    with make(model_dir, mesh=mesh, asleep=True) as llm:
        assert llm.is_sleeping
        assert bytes_of(llm) == 0
        llm.wake_up()
        awake, first = bytes_of(llm), answer(llm)
        for level in (1, 2):
            assert llm.sleep(level=level)
            assert llm.is_sleeping
            kept = sum(leaf.nbytes for leaf in llm.model.leaves.values() if isinstance(leaf, jax.Array))
            assert kept == 0
            assert (bytes_of(llm) == 0) == (level == 2)
            assert bytes_of(llm) < awake
            llm.wake_up()
            assert bytes_of(llm) == awake
            assert answer(llm) == first == expected


@pytest.mark.slow
def test_a_pipeline_sleeps(tmp_path):
    save_tiny(tmp_path / "model", config=ONE_KIND)
    with make(tmp_path / "model", mesh=MeshConfig(pipeline=2), asleep=True) as llm:
        answers = []
        for level in (1, 2):
            llm.wake_up()
            answers.append(answer(llm))
            llm.sleep(level=level)
        llm.wake_up()
        assert answers == [answer(llm)] * 2


@pytest.mark.slow
def test_adapters_are_placed_again(model_dir, tmp_path):
    rng = np.random.default_rng(0)
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    save_adapter(tmp_path / "adapter", {module: random_pair(32, 32, 2, rng) for module in modules})
    params = dataclasses.replace(GREEDY, adapter="one")
    with make(model_dir, adapters={"one": tmp_path / "adapter"}, asleep=True) as llm:
        answers = []
        for level in (1, 2):
            llm.wake_up()
            answers.append(llm.submit("abc", params).result().outputs[0].token_ids)
            llm.sleep(level=level)
        llm.wake_up()
        assert [llm.submit("abc", params).result().outputs[0].token_ids] * 2 == answers
        assert answer(llm) != answers[0]


def test_memory_is_given_back(llm):
    llm.wake_up()
    leaves = list(llm.model.leaves.values())
    answer(llm)
    state = jax.tree.leaves(llm.engine.executor.state.arrays)
    llm.sleep(level=1)
    assert not any(leaf.is_deleted() for leaf in leaves), "a CPU computes where the host's memory is"
    llm.sleep(level=2)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert not spares.STAGING._free
    assert spares.STATES.take(llm.engine.executor.state._shapes) is None
    del state


@pytest.fixture(scope="module")
def twin_dir(model_dir, tmp_path_factory):
    """Another model of the same config."""
    return shutil.copytree(model_dir, tmp_path_factory.mktemp("twin") / "twin")


@contextlib.contextmanager
def room_for(monkeypatch, size):
    """Limit the host's memory to so many bytes more than are reserved."""
    with monkeypatch.context() as patch:
        patch.setattr(host_budget(), "capacity", host_budget().reserved + size)
        yield


def test_a_model_takes_what_it_needs_of_one_that_sleeps(model_dir, twin_dir, expected, monkeypatch):
    """The KV cache first, which nobody has to read again, then as many weights as are lacking."""
    with make(model_dir, asleep=True) as one, make(twin_dir, asleep=True) as other:
        one.wake_up()
        answer(one)
        awake = bytes_of(one)
        one.sleep(level=0)
        assert bytes_of(one) == awake
        arrays = jax.tree.leaves(one.engine.executor.state.arrays)
        weights = one._loaded.lender.weights
        buffer = weights._parts[-1].leaves[0].unsafe_buffer_pointer()
        in_all = weights.device_bytes
        with room_for(monkeypatch, in_all - in_all // 4):
            other.wake_up()
        assert not any(array.is_deleted() for array in arrays), "the other has them"
        assert in_all // 2 < weights.device_bytes < in_all
        assert buffer in {x.unsafe_buffer_pointer() for x in other.model.leaves.values()}
        assert not spares.STAGING._free
        assert answer(other) == expected
        assert other.stats().compile_misses == 0
        other.sleep(level=0)
        with room_for(monkeypatch, 0):
            one.wake_up()
        assert bytes_of(one) == awake
        assert answer(one) == expected
        assert one.stats().compile_misses == 0
        assert 0 < bytes_of(other) < awake


def test_a_model_that_loses_nothing_goes_on_with_its_pages(llm, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.wake_up()
    expected = llm.submit("abc", params).result(60).outputs[0].token_ids
    running = llm.submit("abc", params)
    while not llm.stats().running:
        time.sleep(0.001)
    llm.sleep(level=0, wait=lambda: 0.0)
    assert llm.stats().used_pages > 0
    llm.wake_up()
    assert running.result(60).outputs[0].token_ids == expected
    monkeypatch.setattr(type(llm.engine.executor), "chunk_seconds", 2.0)
    (pool,), config = llm.engine.scheduler.pools, llm.engine.config
    cached = llm.stats().cache_hit_rate * pool.cached * config.page_size
    assert llm.engine.cache_seconds() == pytest.approx(cached / config.chunk_size * 2.0)
    assert cached > 0


def test_nothing_is_lent_that_is_pinned_or_awake(model_dir, twin_dir, expected, monkeypatch):
    with make(model_dir, asleep=True) as one, make(twin_dir, asleep=True) as other:
        one.wake_up()
        with room_for(monkeypatch, 0), pytest.raises(BudgetError, match=r"weights: .* 0 bytes evictable"):
            other.wake_up()
        one.lend(next_use=lambda: 1.0, pinned=True)
        one.sleep(level=0)
        with room_for(monkeypatch, 0), pytest.raises(BudgetError, match="0 bytes evictable"):
            other.wake_up()
        assert one.has_all_memory
        one.lend(next_use=lambda: 1.0)
        with one._sleep_lock, room_for(monkeypatch, 0), ThreadPoolExecutor(1) as thread:  # as while it wakes up
            assert isinstance(thread.submit(other.wake_up).exception(60), BudgetError)
        assert one.has_all_memory
        one.wake_up()
        assert answer(one) == expected


def test_requests_wait_for_the_model(llm, expected):
    futures = [llm.submit("abc", GREEDY) for _ in range(3)]
    given_up = llm.submit("abc", GREEDY)
    given_up.cancel()
    late = llm.submit("abc", GREEDY, deadline=0.05)
    with pytest.raises(NotLoadedError, match="before the model was loaded"):
        late.result(10)
    assert not any(future.done() for future in futures)
    assert 0 <= time.perf_counter() - llm.waiting_since < 60
    assert llm.num_requests == 3
    llm.wake_up()
    assert [future.result(60).outputs[0].token_ids for future in futures] == [expected] * 3
    assert llm.waiting_since is None


def test_tasks_wait_for_the_model(llm, expected):
    async def main():
        stream = asyncio.ensure_future(llm.generate("abc", GREEDY).final())
        cancelled = asyncio.ensure_future(llm.generate("abc", GREEDY).final())
        while llm.num_requests < 2:
            await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(NotLoadedError):
            await llm.generate("abc", GREEDY, deadline=0.02).final()
        while llm.num_requests > 1:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(llm.wake_up)
        return (await stream).outputs[0].token_ids

    assert asyncio.run(asyncio.wait_for(main(), 60)) == expected


def test_requests_that_have_begun_end_first(llm):
    llm.wake_up()
    long = llm.submit("abc", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    while not llm.stats().running:
        time.sleep(0.001)
    sleeping = threading.Thread(target=llm.sleep)
    sleeping.start()
    sleeping.join(60)
    assert long.done()
    assert len(long.result().outputs[0].token_ids) == 100
    assert llm.is_sleeping


def test_requests_that_run_are_interrupted_and_go_on(llm):
    """Their texts are those of requests that nobody interrupts; one is given up meanwhile."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.wake_up()
    expected = [llm.submit(prompt, params).result(60).outputs[0].token_ids for prompt in ("abc", "xy")]
    running = [llm.submit(prompt, params) for prompt in ("abc", "xy", "given up", "late")]
    while llm.stats().running < 4:
        time.sleep(0.001)
    begun = time.perf_counter()
    assert llm.sleep(level=2, wait=lambda: 0.0)
    assert llm.is_sleeping
    assert not any(future.done() for future in running)
    assert llm.waiting_since > begun
    running[2].cancel()
    while llm.num_requests > 3:
        time.sleep(0.001)
    waiting = llm.submit("abc", params)
    for _ in range(2):  # interrupted again, perhaps before they have begun
        llm.wake_up()
        llm.sleep(level=1, wait=lambda: 0.0)
    llm.wake_up()
    assert [future.result(60).outputs[0].token_ids for future in running[:2]] == expected
    assert waiting.result(60).outputs[0].token_ids == expected[0]
    assert len(running[3].result(60).outputs[0].token_ids) == 100
    assert llm.waiting_since is None


def test_a_stream_goes_on_after_an_interruption(llm):
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.wake_up()
    expected = llm.submit("abc", params).result(60).outputs[0].text

    async def main():
        pieces = []
        async for piece in llm.generate("abc", params).text():
            if not pieces:
                await asyncio.to_thread(llm.sleep, level=2, wait=lambda: 0.0)
                await asyncio.to_thread(llm.wake_up)
            pieces.append(piece)
        return "".join(pieces)

    assert asyncio.run(asyncio.wait_for(main(), 60)) == expected


def test_interrupted_requests_have_deadlines_and_can_be_failed(llm):
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.wake_up()
    late, failed = llm.submit("abc", params, deadline=1.0), llm.submit("abc", params)
    while llm.stats().running < 2:
        time.sleep(0.001)
    llm.sleep(level=2, wait=lambda: 0.0)
    with pytest.raises(DeadlineExceededError) as raised:
        late.result(60)
    assert raised.value.output.outputs[0].token_ids is not None
    llm.fail_waiting(NotLoadedError("gone"))
    with pytest.raises(NotLoadedError, match="gone"):
        failed.result(60)
    assert llm.num_requests == 0


def test_a_model_that_is_wanted_stays_awake(llm, monkeypatch, expected):
    llm.wake_up()
    collect, hold = llm.engine.executor.collect, threading.Event()
    monkeypatch.setattr(llm.engine.executor, "collect", lambda step: (hold.wait(60), collect(step))[1])
    running = llm.submit("abc", GREEDY)
    while not llm.stats().running:
        time.sleep(0.001)
    asked = iter([False, True])
    assert not llm.sleep(unless=lambda: next(asked))
    assert not llm.is_sleeping
    waiting = llm.submit("abc", GREEDY)
    hold.set()
    assert running.result(60).outputs[0].token_ids == waiting.result(60).outputs[0].token_ids == expected


def test_requests_that_have_waited_have_their_turn(llm, expected):
    """However soon the model is to sleep again."""
    waiting = llm.submit("abc", GREEDY)
    while llm.waiting_since is None:
        time.sleep(0.001)
    llm.wake_up()
    llm.sleep(level=2)
    assert waiting.done()
    assert waiting.result().outputs[0].token_ids == expected


def test_waiting_requests_can_be_failed(llm, expected):
    failed = llm.submit("abc", GREEDY)
    while llm.waiting_since is None:
        time.sleep(0.001)
    llm.fail_waiting(NotLoadedError("no room"))
    with pytest.raises(NotLoadedError, match="no room"):
        failed.result(10)
    llm.wake_up()
    assert answer(llm) == expected


def test_a_sleeping_model_can_be_closed(model_dir):
    llm = make(model_dir, asleep=True)
    waiting = llm.submit("abc", GREEDY)
    llm.close(drain=True)
    with pytest.raises(ClosedError):
        waiting.result(10)
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(ClosedError):
            call()


def test_too_little_memory(llm, expected, monkeypatch):
    waiting, budget = llm.submit("abc", GREEDY), host_budget()
    monkeypatch.setattr(budget, "capacity", budget.reserved + 1000)
    with pytest.raises(BudgetError, match="weights"):
        llm.wake_up()
    assert llm.is_sleeping
    monkeypatch.undo()
    llm.wake_up()
    assert waiting.result(60).outputs[0].token_ids == expected


def test_a_load_that_fails_leaves_it_asleep(llm, expected, monkeypatch):
    def fails():
        raise CheckpointError("gone")

    weights = llm._loaded.lender.weights
    monkeypatch.setattr(weights, "load", fails)
    with pytest.raises(CheckpointError, match="gone"):
        llm.wake_up()
    assert llm.is_sleeping
    assert bytes_of(llm) == 0
    monkeypatch.undo()
    llm.wake_up()
    assert answer(llm) == expected


def test_files_that_are_damaged_or_cannot_be_written(model_dir, tmp_path, expected, monkeypatch, caplog):
    """The checkpoint is read instead."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    with make(model_dir, asleep=True) as llm:
        llm.wake_up()
        file = max((tmp_path / "cache" / "layers").glob("*/layer-*.bin"), key=lambda each: each.stat().st_size)
        with open(file, "r+b") as opened:
            opened.seek(100)
            opened.write(b"\xff" * 64)
        llm.sleep(level=2)
        llm.wake_up()
        assert "is damaged: its crc32c differs" in caplog.text
        assert answer(llm) == expected
        shutil.rmtree(tmp_path / "cache" / "layers")
        (tmp_path / "cache" / "layers").write_text("in the way")
        llm.sleep(level=2)
        llm.wake_up()
        assert answer(llm) == expected


def test_an_encoder_sleeps(tmp_path):
    convert(GOLDEN, tmp_path / "encoder")
    expected = Embedder(tmp_path / "encoder", max_batch=2).embed([[5, 6]])
    with AsyncLLM(tmp_path / "encoder", max_batch=2, asleep=True) as llm:

        async def embed():
            return await llm.embed([[5, 6]])

        for level in (2, 1):
            llm.wake_up()
            np.testing.assert_array_equal(asyncio.run(embed()), expected)
            llm.sleep(level=level)


def test_streamed_weights_do_not_sleep(model_dir):
    with make(model_dir, weights="host", max_decode_passes=1) as llm:
        assert not llm.can_sleep
        with pytest.raises(ValueError, match="sleep is not implemented for a model whose weights are streamed"):
            llm.sleep()
    with pytest.raises(ValueError, match="weights='host' is not implemented for a model that can sleep"):
        make(model_dir, weights="host", asleep=True)


def test_levels_are_zero_to_two(llm):
    for level in (-1, 3, True, "1", None, 1e30):
        with pytest.raises(ValueError, match="level must be 0, 1 or 2"):
            llm.sleep(level=level)
