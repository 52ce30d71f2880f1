"""Experts that were used last stay; those that are there do not wait for others, and none leaves while it is used."""

import itertools

import pytest

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.compiled import Costs
from jaxinfer.streaming.experts import GROUP, ExpertCache
from jaxinfer.streaming.statistics import StreamingStatistics

EXPERTS = 12
PLACES = {(layer, expert): 100 + layer * EXPERTS + expert for layer in range(2) for expert in range(EXPERTS)}


class Link:
    """A store whose experts are there when they are waited for; notes who came and went."""

    def __init__(self):
        self.started, self.live, self.peak, self.broken, self.ready = [], set(), 0, set(), False

    def start(self, place):
        self.started.append(place)
        assert place not in self.live
        self.live.add(place)
        self.peak = max(self.peak, len(self.live))
        return Travelling(self, place)

    def close(self):
        pass


class Travelling:
    tier, bytes, cpu_seconds, interval = "disk", 10, 0.0, None

    def __init__(self, link, place):
        self.link, self.place_in_store = link, place

    @property
    def ready(self):
        return self.link.ready

    def settle(self):
        if self.place_in_store in self.link.broken:
            raise CheckpointError("broken")
        self.interval = (0.0, 1.0)
        return self.arrays()

    def arrays(self):
        assert self.interval, "it is used before it is there"
        return [self.place_in_store]

    def release(self):
        self.link.live.remove(self.place_in_store)


class Computation:
    """Done once something waits for it; until then its experts must be there."""

    def __init__(self, link, places):
        self.link, self.places, self.done = link, places, False

    def block_until_ready(self):
        assert self.places <= self.link.live
        self.done = True
        return self


def cache_of(link, slots):
    return ExpertCache(link, PLACES, slots, statistics=StreamingStatistics(), costs=Costs())


def use(cache, link, layer, experts):
    """Compute with the experts, and return the groups in which they came."""
    came, places = [], set()
    for group in cache.groups(layer, experts):
        assert all(leaves == [PLACES[layer, expert]] for expert, leaves in group)
        came.append([expert for expert, _ in group])
        places |= {leaves[0] for _, leaves in group}
        cache.computing(Computation(link, {place for place in places if place in link.live}))
    return came


def test_experts_that_are_there_come_first_and_together():
    link = Link()
    cache = cache_of(link, 8)
    assert use(cache, link, 0, [1, 5]) == [[1], [5]]
    assert use(cache, link, 0, [0, 1, 5]) == [[1, 5], [0]]
    link.ready = True
    assert use(cache, link, 1, [2, 3]) == [[2, 3]]
    assert link.started == [101, 105, 100, 114, 115]
    assert (cache._statistics.expert_hits, cache._statistics.expert_fetches) == (2, 5)
    assert cache._statistics.bytes == {"disk": 50}
    assert cache._statistics.expert_bytes == 50


def test_all_that_are_missing_are_asked_for_before_one_is_computed():
    link = Link()
    groups = cache_of(link, 8).groups(0, [3, 4, 5])
    next(groups)
    assert link.started == [103, 104, 105]


def test_the_least_recently_used_leave():
    link = Link()
    cache = cache_of(link, 4)
    for experts in ([0, 1], [2, 3], [0], [4]):  # the last one in the place of expert 1
        use(cache, link, 0, experts)
    assert link.live == {100, 102, 103, 104}
    use(cache, link, 0, [0, 5])  # in the place of expert 2
    assert link.live == {100, 103, 104, 105}


@pytest.mark.parametrize("slots", [2, 4, 5])
@pytest.mark.parametrize("ready", [False, True])
def test_more_experts_than_there_is_room_for_come_one_after_the_other(slots, ready):
    link = Link()
    link.ready = ready
    cache = cache_of(link, slots)
    for _ in range(2):
        came = use(cache, link, 0, list(range(EXPERTS)))
        assert sorted(itertools.chain(*came)) == list(range(EXPERTS))
        assert max(map(len, came)) <= GROUP
    assert link.peak == slots


def test_a_cache_begins_anew_after_an_expert_that_cannot_be_read():
    link = Link()
    link.broken = {102}
    cache = cache_of(link, 4)
    with pytest.raises(CheckpointError, match="broken"):
        use(cache, link, 0, [1, 2])
    cache.restart()
    cache.restart()
    assert not link.live
    link.broken = set()
    assert use(cache, link, 0, [1, 2]) == [[1], [2]]
