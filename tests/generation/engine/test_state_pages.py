"""Recurrent states as pages of a tier: what a state becomes, when it moves, and when it comes back."""

import numpy as np
import pytest

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.batch import StateBlock
from jaxinfer.generation.engine.host_pages import READ_PAGE, HostPages
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.page_tier import bytes_of_page
from jaxinfer.generation.engine.restoring import TRIES, WRITE_PAGE, Restoring
from jaxinfer.generation.engine.snapshots import Snapshots
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.engine.state_pages import StatePages
from tests.generation.engine.test_host_pages import BUCKETS, PAGE, empty_block, fill

STATE = StateBlock((np.empty((2, 3, 5), np.float32), np.empty((2,), np.int32), np.empty((2, 4, 40), np.float16)))
SIZE, CHUNK = 2, 4
"""Tokens of a page and of a chunk: snapshots lie at every other page."""
TOKENS = list(range(10, 22))


def some_state(number):
    """A state on the host, [S, 1, ...]."""
    return StateBlock(
        tuple(number + np.arange(x.size, dtype=x.dtype).reshape(x.shape[0], 1, *x.shape[1:]) for x in STATE.arrays)
    )


@pytest.fixture
def states():
    return StatePages(PAGE, STATE, BUCKETS)


def test_a_state_is_the_same_after_pages(states):
    """It comes after pages of their own, from a tier whose pages have several arrays and two stages."""
    tier, keys = HostPages(20, PAGE, BUCKETS, Costs()), [*states.keys(b"end")]
    assert len(set(keys)) == states.count > 1
    assert (states.count - 1) * bytes_of_page(PAGE) < 128 + 64 + 640 <= states.count * bytes_of_page(PAGE)
    page = empty_block(2)
    fill(page, 0, 7)
    tier.put([b"page"], [page])
    tier.put(keys, [states.pack(some_state(3))])
    block, state = states.unpack(tier.get([b"page", *keys]).result.result(60).block, 1)
    assert block.places == 2
    np.testing.assert_array_equal(block.kv[0][:, 0], page.kv[0][:, 0])
    for found, wanted in zip(state.arrays, some_state(3).arrays, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    tier.close()


class Lane:
    """A lane's records; `fill` computes tokens, of which it takes snapshots after some."""

    def __init__(self, states, *, count=2, costs=None):
        self.pool = PagePool(16, SIZE, lambda root: b"root")
        self.snapshots = Snapshots(count, self.pool, CHUNK, has_tier=True)
        self.tier = HostPages(60, PAGE, BUCKETS, Costs())
        costs = PassCosts(costs or Costs(), 0, chunks=(1,))
        self.restoring = Restoring(self.pool, self.tier, costs, CHUNK, self.snapshots, states)

    def fill(self, tokens, *ends):
        match = self.pool.match("root", tokens)
        pages, node = match.pages + self.pool.allocate(len(tokens) // SIZE - len(match.pages)), match.parent
        for index in range(len(match.pages), len(pages)):
            node = self.pool.insert(node, tokens[SIZE * index : SIZE * (index + 1)], pages[index])
            if SIZE * (index + 1) in ends:
                self.snapshots.take(node, 0)
        self.pool.release(pages)
        self.snapshots.begin_step()
        self.snapshots.take_due()

    def forget(self):
        """Have all pages taken, and what leaves brought to the tier; returns how many pages and states that were."""
        self.pool.release(self.pool.allocate(16))
        return self.store()

    def store(self):
        pages, states = self.restoring.take_stored()
        for _, key in pages:
            self.tier.put([key], [empty_block(2)])
        for _, key in states:
            self.tier.put([*self.restoring._states.keys(key)], [self.restoring._states.pack(some_state(0))])
        return len(pages), len(states)

    def reach(self, tokens=TOKENS):
        return self.restoring.reach("root", tokens, self.snapshots.covered("root", tokens) // SIZE)


@pytest.fixture
def lane(states):
    return Lane(states)


def test_pages_move_with_the_state_after_them(lane):
    lane.fill(TOKENS, 4, 8)  # the last two pages lead to no state
    assert lane.reach() == 4
    assert lane.forget() == (4, 2)
    assert lane.snapshots.covered("root", TOKENS) == 0
    assert lane.reach() == lane.reach(TOKENS[:9]) == 4
    assert lane.reach(TOKENS[:7]) == 2
    assert lane.reach([9, *TOKENS]) == 0
    assert lane.forget() == (0, 0)
    lane.tier.forget(lane.restoring._states.keys(lane.pool.key_of("root")))  # of no state
    lane.tier.forget([[*lane.restoring._states.keys(key)][-1] for key in lane.pool.keys_after("root", TOKENS[:8])][3:])
    assert lane.reach() == 2  # a part of the last state is gone


def test_a_state_whose_place_is_taken_comes_back_to_its_pages(lane):
    """Its pages are still on the devices."""
    lane.fill(TOKENS, 8)
    lane.fill([1] * 4, 4)
    lane.fill([2] * 4, 4)
    assert lane.snapshots.covered("root", TOKENS) == 0
    assert lane.store() == (0, 1)
    assert lane.reach() == 4
    match = lane.pool.match("root", TOKENS[:8])
    load = lane.restoring.begin_state(None, match, TOKENS, 4, 0)
    assert (load.before, load.reach, len(load.keys)) == (4, 4, lane.restoring._states.count)
    assert lane.restoring.begin_state(load, match, TOKENS, 4, 0) is load
    _, state, pages = lane.restoring.end_state(load, 4)
    assert pages == len(load.keys)
    assert state.arrays[0].shape == (2, 1, 3, 5)
    place = lane.snapshots.restore(match.parent)
    assert lane.snapshots.copied(match.parent) is None  # not before the step has run
    assert lane.snapshots.use(match.parent, extends=False) == place
    lane.snapshots.begin_step()
    assert lane.snapshots.copied(match.parent) == place
    lane.snapshots.check_integrity()


def test_the_state_of_an_earlier_turn_stays_behind(lane):
    lane.fill(TOKENS[:4], 4)
    lane.snapshots.use(lane.pool.full_nodes("root", TOKENS)[-1], extends=True)
    lane.fill(TOKENS, 12)
    assert lane.forget() == (6, 1)
    assert (lane.reach(), lane.reach(TOKENS[:8])) == (6, 0)


def test_pages_on_the_devices_meanwhile_are_not_taken_from_a_load(lane):
    lane.fill(TOKENS, 12)
    lane.forget()
    load = lane.restoring.begin_state(None, lane.pool.match("root", []), TOKENS, 6, 0)
    assert (load.before, len(load.keys)) == (0, 6 + lane.restoring._states.count)
    block, _, pages = lane.restoring.end_state(load, 2)
    assert block.places >= 6
    assert lane.tier.stats["host_kv"].read_back == 4 + pages


@pytest.mark.parametrize(("chunk", "comes"), [(1.0, True), (0.25, False)])
def test_the_bytes_of_states_count(states, chunk, comes):
    """Two chunks are saved, by reading four pages and a state as large as several."""
    costs = Costs()
    bucket = ("prefill", (("chunks", 1), ("batch", 0)))
    for key, seconds in {bucket: chunk, (READ_PAGE, ()): 0.05, (WRITE_PAGE, ()): 0.05}.items():
        costs.replace(*key, [seconds] * TRIES)
    lane = Lane(states, costs=costs)
    lane.fill(TOKENS, 8)
    lane.forget()
    assert 2 * chunk > 4 * 0.1  # pages alone would come
    load = lane.restoring.begin_state(None, lane.pool.match("root", []), TOKENS, 4, 0)
    assert (load is not None) == comes
