"""How many pages of a prompt are computed while the others come from a tier, by the record of costs."""

from collections import Counter

import numpy as np
import pytest

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.page_tier import Load
from jaxinfer.generation.engine.restoring import RETRY, TRIES, WRITE_PAGE, Restoring
from jaxinfer.generation.engine.speculation import PassCosts

PAGES, PAGE, CHUNK = 128, 16, 32
TOKENS = list(range(PAGES * PAGE + 1))


class Tier:
    """Has all pages, of which the last come from a slower place."""

    def __init__(self, slow=0):
        self.slow = slow

    def __contains__(self, key):
        return True

    def get(self, keys):
        return Load(tuple(keys), None, began=0.0, clock=lambda: 0.0)

    def reads(self, keys):
        slow = min(self.slow, len(keys))
        return +Counter(fast=len(keys) - slow, slow=slow)


def begin(costs, *, tier=None, sizes=(1, 4, 16)):
    """The decision for a prompt that has one token after its pages. costs: of a chunk, and by name those of pages."""
    record = Costs()
    chunk = costs.pop("chunk")
    known = {(name, ()): seconds for name, seconds in costs.items()}
    known |= {("prefill", (("chunks", n), ("batch", 0))): n * chunk * (1.2 if n < 16 else 1) for n in sizes}
    for key, seconds in known.items():
        record.replace(*key, [seconds] * TRIES)
    pool = PagePool(PAGES, PAGE, lambda root: b"root")
    restoring = Restoring(pool, tier or Tier(), PassCosts(record, 0, chunks=sizes), CHUNK)
    return restoring, restoring.begin(None, "root", TOKENS)


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.05, 0, 0), (0.5, 0.25, 0.4), (1, 0.45, 0.55), (4, 0.75, 0.85)])
def test_both_ends_meet_where_both_take_equally_long(ratio, low, high):
    """ratio: of reading a page to computing it. The chunks of all pages take 64 s, of which 16 go into a step."""
    _, load = begin({"chunk": 1.0, "fast": ratio / 2, WRITE_PAGE: 1e-6})
    assert low * PAGES <= load.num_computed <= high * PAGES
    assert load.num_computed + len(load.keys) == PAGES
    assert load.until == pytest.approx(len(load.keys) * ratio / 2 + 1.2, rel=0.05)


def test_a_page_that_takes_longer_to_write_is_computed():
    assert begin({"chunk": 1.0, "fast": 0.01, WRITE_PAGE: 1.0})[1] is None


def test_the_slower_place_of_the_last_pages_counts():
    computed = [begin({"chunk": 1.0, "fast": 0.4, "slow": 2.0, WRITE_PAGE: 0.0}, tier=Tier(n))[1] for n in (1, 32)]
    assert computed[0].num_computed < computed[1].num_computed


@pytest.mark.parametrize("missing", ["chunk", "fast", WRITE_PAGE])
def test_what_is_not_known_is_tried(missing):
    costs = {"chunk": 1.0, "fast": 9.0, WRITE_PAGE: 9.0}
    if missing == "chunk":
        _, load = begin(costs, sizes=())
    else:
        del costs[missing]
        _, load = begin(costs)
    assert (load.num_computed, len(load.keys)) == (0, PAGES)


def test_no_way_is_slower_than_the_better_single_one():
    """By the same record, and against all other splits, whose steps may be better filled."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs = {"chunk": 1.0, "fast": float(rng.exponential(1)), WRITE_PAGE: float(rng.exponential(0.1))}
        restoring, load = begin(dict(costs))

        def seconds(first, costs=costs, compute=restoring._costs.prefill_seconds):
            pages = PAGES - first
            return max(compute(first * PAGE // CHUNK), pages * costs["fast"]) + pages * costs[WRITE_PAGE]

        chosen = PAGES if load is None else load.num_computed
        assert seconds(chosen) <= 1.06 * min(seconds(0), seconds(PAGES))  # percentiles of the record are bins
        assert seconds(chosen) <= 1.25 * min(map(seconds, range(0, PAGES, 2)))


def test_a_slow_tier_is_tried_again():
    restoring, load = begin({"chunk": 1e-3, "fast": 9.0, WRITE_PAGE: 1.0})
    loads = [load, *(restoring.begin(None, "root", TOKENS) for _ in range(2 * RETRY - 1))]
    assert [load is not None for load in loads] == [n % RETRY == RETRY - 1 for n in range(2 * RETRY)]
