"""Layers come in time, and never more of them than there is room for."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxinfer.compiled import Costs
from jaxinfer.streaming.config import PrefetchDepth
from jaxinfer.streaming.prefetch import Prefetcher
from jaxinfer.streaming.statistics import StreamingStatistics

LAYERS = 6


class Link:
    """A store whose layers travel one after the other, each for so long; counts what is there."""

    def __init__(self, seconds):
        self.seconds, self.link = seconds, ThreadPoolExecutor(1)
        self.started, self.live, self.peak = [], 0, 0

    def start(self, layer):
        self.started.append(layer)
        self.live += 1
        self.peak = max(self.peak, self.live)
        return Travelling(self, layer)


class Travelling:
    tier, bytes, cpu_seconds, interval, ready = "disk", 100, 0.0, None, False

    def __init__(self, link, layer):
        self.link, self.layer, self.released = link, layer, False
        self.future = link.link.submit(self.travel)

    def travel(self):
        begun = time.perf_counter()
        time.sleep(self.link.seconds)
        return begun, time.perf_counter()

    def place(self):
        pass

    def arrays(self):
        assert not self.released
        self.interval = self.future.result()
        return [self.layer]

    def release(self):
        self.future.result()
        self.released = True
        self.link.live -= 1


class Result:
    """Computed after so many seconds; `jax.block_until_ready` waits for it."""

    def __init__(self, seconds):
        self.done = threading.Timer(seconds, lambda: None)
        self.done.start()

    def block_until_ready(self):
        self.done.join()
        return self


class Unfinished:
    """Computed once something waits for it."""

    done = False

    def block_until_ready(self):
        self.done = True
        return self


def run(prefetcher, seconds, passes=1, layers=LAYERS, streamed=range(LAYERS)):
    for _ in range(passes):
        for layer in range(layers):
            if layer in streamed:
                assert prefetcher.get(layer) == [layer]
            prefetcher.computing(Result(seconds))
        prefetcher.finish()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_more_layers_than_there_is_room_for(depth):
    link = Link(0.0)
    prefetcher = Prefetcher(link, range(LAYERS), PrefetchDepth(device=depth, host=depth), Costs())
    run(prefetcher, 0.001, passes=3)
    assert link.peak == depth + 1
    assert link.started[: 2 * LAYERS] == [*range(LAYERS)] * 2
    prefetcher.restart()
    assert prefetcher.live == 0


def test_fetching_overlaps_with_computing():
    overlaps = {}
    for depth in (0, 1):
        prefetcher = Prefetcher(Link(0.03), range(LAYERS), PrefetchDepth(device=depth, host=depth), Costs())
        run(prefetcher, 0.03, passes=3)
        overlaps[depth] = prefetcher.statistics.overlap
        prefetcher.restart()
    assert prefetcher.live == 0
    assert overlaps[0] == 0
    assert overlaps[1] >= 0.6  # 0.9 on a quiet machine


def test_resident_layers_are_not_fetched():
    link = Link(0.0)
    prefetcher = Prefetcher(link, [1, 3, 5], PrefetchDepth(), Costs())
    run(prefetcher, 0.0, passes=2, streamed=[1, 3, 5])
    assert link.peak == 2
    assert link.started[:6] == [1, 3, 5] * 2
    assert prefetcher.statistics.layers == 2 * LAYERS
    prefetcher.restart()
    assert prefetcher.live == 0


@pytest.mark.parametrize(("depth", "behind"), [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_more_depth_lets_the_host_run_ahead(depth, behind):
    """So many computations may not be done when the next layer is sent; one layer is fetched ahead nevertheless."""

    class There(Travelling):
        ready = True

    class Near(Link):
        def start(self, layer):
            super().start(layer).release()
            self.live += 1
            return There(self, layer)

    link, results = Near(0.0), []
    prefetcher = Prefetcher(link, range(LAYERS), PrefetchDepth(device=depth, host=depth), Costs())
    for layer in [*range(LAYERS)] * 2:
        prefetcher.get(layer)
        assert sum(not result.done for result in results) == min(behind, len(results))
        assert prefetcher.live == depth + 1
        prefetcher.computing(result := Unfinished())
        results.append(result)
    prefetcher.finish()
    assert all(result.done for result in results)
    prefetcher.restart()


def test_layers_that_stay_are_not_waited_for():
    link = Link(0.0)
    prefetcher = Prefetcher(link, [0, 3], PrefetchDepth(), Costs())
    prefetcher.get(0)
    prefetcher.computing(Result(0.0))
    prefetcher.computing(range_of_two := Unfinished(), 2)
    link.link.submit(int).result()  # layer 3 is there
    prefetcher._queue[1][1].ready = True
    prefetcher.get(3)
    assert not range_of_two.done
    prefetcher.restart()


def test_one_streamed_layer_is_not_held_twice():
    link = Link(0.0)
    prefetcher = Prefetcher(link, [0], PrefetchDepth(device=3, host=3), Costs())
    run(prefetcher, 0.0, passes=3, layers=1)
    assert link.peak == 1
    prefetcher.restart()
    assert prefetcher.live == 0


def test_a_pass_that_is_given_up_begins_anew():
    link = Link(0.0)
    prefetcher = Prefetcher(link, range(LAYERS), PrefetchDepth(), Costs())
    run(prefetcher, 0.0, layers=3)
    prefetcher.restart()
    assert link.live == prefetcher.live == 0
    run(prefetcher, 0.0, passes=2)
    run(prefetcher, 0.0, layers=2)
    run(prefetcher, 0.0)  # another order than was expected
    prefetcher.restart()
    assert prefetcher.live == 0


def test_a_fetch_that_fails_is_raised_and_forgotten():
    class Failing(Travelling):
        def arrays(self):
            if self.layer == 2 and fails:
                raise ValueError("layer 2: injected")
            return super().arrays()

    class Disk(Link):
        def start(self, layer):
            super().start(layer).release()
            self.live += 1
            return Failing(self, layer)

    link, fails = Disk(0.0), [True]
    prefetcher = Prefetcher(link, range(LAYERS), PrefetchDepth(), Costs())
    with pytest.raises(ValueError, match="layer 2"):
        run(prefetcher, 0.0)
    fails.clear()
    prefetcher.restart()
    run(prefetcher, 0.0, passes=2)
    prefetcher.restart()
    assert prefetcher.live == 0


def test_what_fetches_cost_is_recorded():
    costs = Costs()
    prefetcher = Prefetcher(Link(0.002), range(LAYERS), PrefetchDepth(), costs)
    run(prefetcher, 0.0)
    cost = costs.for_sizes("fetch_disk")
    assert cost is not None
    assert cost.mean > 0.002
    assert prefetcher.statistics.bytes == {"disk": 100 * LAYERS}
    prefetcher.restart()
    assert prefetcher.live == 0


@pytest.mark.parametrize("depth", [(-1, 0), (2, 1)])
def test_impossible_depths(depth):
    with pytest.raises(ValueError, match="0 <= device <= host"):
        PrefetchDepth(device=depth[0], host=depth[1])


def test_overlap_counts_a_link_once():
    statistics = StreamingStatistics()
    statistics.computed((0.0, 1.0))
    statistics.fetched("disk", 10, (0.0, 0.5))
    statistics.fetched("disk", 10, (0.0, 1.0))  # asked for at once, and travelled after the other
    assert statistics.overlapped_seconds == pytest.approx(1.0)
    assert statistics.overlap == pytest.approx(1.0)
    assert statistics.bandwidth("disk") == pytest.approx(20.0)
    statistics.clear()
    assert (statistics.overlap, statistics.bandwidth("disk"), statistics.layers) == (0.0, 0.0, 0)
