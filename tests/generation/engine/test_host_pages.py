"""Pages of the prefix cache on the host, against a model that keeps their contents."""

import subprocess
import sys
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.host_pages import HostPages
from jaxinfer.generation.engine.page_tier import BlockMemory, parts_of
from jaxinfer.generation.execution.plan import MOVES

COUNT = 5
CONFIG = EngineConfig(max_batch=2, context=64)
BUCKETS = Buckets.from_config(CONFIG, moves=(2, 4))
PAGE = PageBlock(
    (np.empty((2, 3, 2, 4), ml_dtypes.bfloat16), np.empty((2, 1, 2, 3), ml_dtypes.bfloat16)),
    (np.empty((2, 3, 5), np.float32), np.empty((2, 1, 7), np.float32)),
)
KEYS = [bytes([key]) for key in range(9)]


def empty_block(count):
    """A block for so many pages."""
    return BlockMemory(PAGE).make_block(count)


def fill(block, index, number):
    """Write what page `number` has at a place of a block."""
    for x in parts_of(block):
        x[:, index] = np.arange(x[:, index].size).reshape(x[:, index].shape) % 7 + number


class Tier(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pages = HostPages(COUNT, PAGE, BUCKETS, Costs())
        self.known = OrderedDict()  # key -> what was written last; the least recently used first
        self.loads = []
        self.written = 0

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def put(self, keys):
        blocks = [empty_block(size) for size in BUCKETS.moves_of(len(keys))]
        for index, key in enumerate(keys):
            self.written += 1
            fill(blocks[index // 4], index % 4, self.written)
            if key not in self.known:
                self.known[key] = self.written
                if len(self.known) > COUNT:
                    self.known.popitem(last=False)
            self.known.move_to_end(key)
        self.pages.put(keys, blocks)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def get(self, data):
        keys = data.draw(st.lists(st.sampled_from(list(self.known)), min_size=1, unique=True))
        self.loads.append((self.pages.get(keys), [self.known[key] for key in keys]))
        for key in reversed(keys):
            self.known.move_to_end(key)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def forget(self, data):
        key = data.draw(st.sampled_from(list(self.known)))
        del self.known[key]
        self.pages.forget([key, b"unknown"])

    @rule()
    def clear(self):
        self.pages.free_memory()
        self.known.clear()

    @invariant()
    def the_same_pages_are_known(self):
        self.pages.check_integrity()
        assert self.pages.stats["host_kv"].pages == len(self.known)
        order = list(self.known)
        assert [key in self.pages for key in KEYS] == [key in order for key in KEYS]  # which is a use
        for key in KEYS:
            if key in self.known:
                self.known.move_to_end(key)

    def teardown(self):
        """A load has what its pages had when it was asked for, whatever came after."""
        for load, numbers in self.loads:
            block, count = load.result.result(60)
            assert count == len(numbers)
            assert block.places == sum(BUCKETS.moves_of(len(numbers)))
            expected = empty_block(len(numbers))
            for index, number in enumerate(numbers):
                fill(expected, index, number)
            for found, wanted in zip(parts_of(block), parts_of(expected), strict=True):
                np.testing.assert_array_equal(found[:, : len(numbers)], wanted)


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=30, stateful_step_count=15, derandomize=True, database=None)


@pytest.mark.slow
def test_many_orders():
    class Longer(Tier):
        pass

    case = Longer.TestCase
    case.settings = settings(max_examples=500, stateful_step_count=40, database=None)
    case().runTest()


def test_moves_hold_all_pages():
    buckets = Buckets.from_config(CONFIG, moves=MOVES)
    for pages in range(100):
        moves = buckets.moves_of(pages)
        assert 0 <= sum(moves) - pages < MOVES[-1]
        assert set(moves) <= set(MOVES)
        assert buckets.moves_of(sum(moves)) == moves
    assert Buckets.from_config(CONFIG).moves == ()


def test_statistics_count_bytes():
    pages = HostPages(COUNT, PAGE, BUCKETS, Costs())
    block = empty_block(2)
    pages.put(KEYS[:2], [block])
    pages.put(KEYS[:3], [block, block])
    pages.admitted(pages.get(KEYS[:3]), KEYS[1:3])
    stats = pages.stats["host_kv"]
    assert (stats.pages, stats.stored, stats.read_back, stats.hits) == (3, 3, 2, 1)
    assert stats.waited > 0
    assert stats.stored_bytes == 3 * sum(x.nbytes for x in parts_of(PAGE))
    assert "3 of 5 in use" in str(stats)


@pytest.mark.slow
def test_the_process_ends_after_the_copy_of_a_worker_that_was_dropped():
    lines = ["import time", "from jaxinfer.generation.engine.page_tier import make_worker"]
    lines += ["def copy():", "    time.sleep(0.5)", "    print('copied')"]
    lines += ["worker = make_worker('test')", "worker.submit(copy)", "time.sleep(0.1)", "del worker"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout == "copied\n"


def test_a_block_takes_the_memory_of_one_that_nobody_has():
    memory = BlockMemory(PAGE)
    first = memory.make_block(4)
    part = first.kv[1][1:, 2]
    del first
    second = memory.make_block(3)  # while a part of the first is there
    assert not np.shares_memory(second.kv[1], part)
    assert not memory._kept
    del part
    (kept,) = memory._kept
    assert np.shares_memory(memory.make_block(2).scale[1], kept)
    memory.free()
    assert not memory._kept
