"""The simulated engine: steps that take known times, on the engine's own scheduler."""

import dataclasses

import pytest

from jaxinfer.compiled import Costs
from jaxinfer.compiled.costs import CostTable
from jaxinfer.evaluation.generation.replay import TokenRequest
from jaxinfer.evaluation.generation.simulator import simulate
from jaxinfer.evaluation.generation.step_times import PlannedTimes, RecordedTimes
from jaxinfer.evaluation.generation.virtual_pages import TierTimes
from jaxinfer.evaluation.serving.figures import Objective, summarise
from jaxinfer.generation.engine.batch import Batch, Chunk, DecodeRow
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.host_pages import READ_PAGE
from jaxinfer.generation.engine.restoring import TRIES, WRITE_PAGE
from jaxinfer.generation.execution.plan import Plan, Way
from jaxinfer.generation.execution.platforms import buckets_of
from jaxinfer.sharding.planner import Catalogue, Runner, Tokens, Ways
from jaxinfer.sharding.planner.search import FORMATS
from jaxinfer.sizes import round_up

CONFIG = EngineConfig(max_batch=4, context=64, page_size=8, token_budget=32, chunk_size=16, max_decode_passes=4)
PLAN = Plan(way=Way.WHOLE, buckets=buckets_of(CONFIG, "cpu"), num_pages=32)


class Times:
    """10 ms for each chunk, 1 ms for each pass."""

    def seconds(self, batch):
        return 0.010 * len(batch.chunks) if batch.chunks else 0.001 * batch.passes


def fixed(pass_seconds=0.001):
    rows = PLAN.decoder_buckets.decode_rows
    return Costs.fixed({("decode", (("batch", count), ("speculative", 0))): pass_seconds for count in rows})


def request(arrival=0.0, prompt=20, output_tokens=9, first=1):
    return TokenRequest(arrival=arrival, prompt=[*range(first, first + prompt)], output_tokens=output_tokens)


def run(*requests, config=CONFIG, num_pages=32, **others):
    plan = dataclasses.replace(PLAN, num_pages=num_pages)
    options = {"times": Times(), "costs": fixed(), "platform": "cpu"} | others
    return simulate(requests, config, plan, **options)


def test_one_request_takes_its_steps():
    (record,) = run(request(arrival=0.5)).records
    events = [0.5 + 0.020, 0.5 + 0.024, 0.5 + 0.028]  # two chunks, then four passes in each step
    assert record.events == pytest.approx(events)
    assert (record.arrival, record.prompt_tokens, record.output_tokens, record.error) == (0.5, 20, 9, "")
    assert record.ended == pytest.approx(events[-1])


def test_a_request_waits_for_its_slot():
    first, second = run(request(), request(first=30), config=dataclasses.replace(CONFIG, max_batch=1)).records
    assert second.events[0] == pytest.approx(first.ended + 0.020)
    figures = summarise([first, second], Objective(ttft_ms=30))
    assert figures.goodput == pytest.approx(1 / second.ended)


def test_prefixes_are_shared_and_pages_run_short():
    shared = run(request(), request(arrival=1.0))
    assert (shared.cached_tokens, shared.preemptions, shared.steps) == (19, 0, 6)
    assert shared.hit_rate == pytest.approx(19 / 40)
    assert shared.records[1].events[0] == pytest.approx(1.0 + 0.004)  # it decodes at once
    short = run(request(output_tokens=40), request(output_tokens=40, first=30), num_pages=9)
    assert short.preemptions > 0
    assert [record.output_tokens for record in short.records] == [40, 40]


def test_lanes_run_together():
    alone = run(*(request(first=at) for at in (1, 40)), lanes=2)
    assert [record.ended for record in alone.records] == pytest.approx(
        [0.048, 0.048]
    )  # a step of four chunks, then 8 passes


def test_pages_come_back_from_the_host():
    buckets = dataclasses.replace(PLAN.decoder_buckets, moves=(4, 8))
    plan = dataclasses.replace(PLAN, num_pages=6, host_pages=16, buckets=buckets)
    tier = TierTimes(read=0.1, write=0.02)
    loads = [request(at, prompt=40, output_tokens=2, first=first) for at, first in ((0.0, 1), (2.0, 101), (4.0, 1))]
    done = simulate(loads, CONFIG, plan, Times(), costs=fixed(), platform="cpu", tier=tier)
    assert done.cached_tokens == 32  # four full pages; the last token's is computed
    first, _, third = done.records
    assert first.events[0] == pytest.approx(0.030)
    assert third.events[0] == pytest.approx(4.0 + 4 * 0.1 + 4 * 0.02 + 0.010)
    with pytest.raises(ValueError, match="no page that came back from the host"):
        TierTimes.from_costs(CostTable({}))


LONG = EngineConfig(max_batch=1, context=1040, page_size=16, max_decode_passes=1)  # 32 chunks, of which a step has 16
STEPS = {1: 1.2, 4: 4.4, 16: 16.0}
"""Seconds of steps by their chunks."""


def again(page_seconds, recorded=None):
    """The seconds to the first token of a prompt of 64 pages that only the host has.

    recorded: seconds of a page in the record of costs; None: it knows none, and so all pages are copied.
    """
    buckets = dataclasses.replace(buckets_of(LONG, "cpu"), moves=(16,))
    plan = Plan(way=Way.WHOLE, buckets=buckets, num_pages=66, host_pages=200)

    class Steps:
        def seconds(self, batch):
            return STEPS[round_up(len(batch.chunks), tuple(STEPS))] if batch.chunks else 0.1

    known = {("prefill", (("chunks", n), ("batch", 0))): seconds for n, seconds in STEPS.items()}
    record = Costs()
    if recorded is not None:
        for key, seconds in (known | {(READ_PAGE, ()): recorded, (WRITE_PAGE, ()): 1e-3}).items():
            record.replace(*key, [seconds] * TRIES)
    tier = TierTimes(read=page_seconds, write=1e-3)
    loads = [request(at, prompt=1025, output_tokens=1, first=1 + first) for at, first in ((0.0, 0), (1e4, 5), (2e4, 0))]
    done = simulate(loads, LONG, plan, Steps(), costs=record, platform="cpu", tier=tier)
    return done.records[2].events[0] - 2e4


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0])
def test_a_prompt_from_both_ends_is_as_fast_as_the_better_single_way(ratio):
    """ratio: of the seconds of copying a page to those of computing it."""
    page = ratio * 32 / 64
    copied, computed, both = again(page), again(1e4, recorded=1e4), again(page, recorded=page)
    assert computed == pytest.approx(2 * 16)
    best = min(copied, computed)
    assert both <= 1.001 * best
    if 0.5 <= ratio <= 2.0:
        assert both < 0.8 * best


@pytest.mark.parametrize("wrong", [0.25, 4.0])
def test_a_wrong_record_costs_little(wrong):
    """Copying takes as long as computing, and by the record a quarter of that, or four times as long."""
    assert again(0.5, recorded=0.5 * wrong) < 1.2 * again(0.5)


def test_what_could_never_run_is_refused():
    with pytest.raises(ValueError, match="The prompt has 64 tokens; the context of 64"):
        run(request(prompt=64))


# Times of steps


def chunk(count, start=0, slot=0):
    return Chunk(None, slot, start, count, True, [0])


def prefill(chunks, rows=0):
    return Batch(chunks=tuple(chunk(16) for _ in range(chunks)), rows=(DecodeRow(None, 0, [0]),) * rows)


def test_recorded_times_of_known_and_of_new_sizes():
    sizes = {(chunks, rows): 0.001 + 0.002 * chunks + 0.0005 * rows for chunks, rows in [(1, 0), (2, 0), (1, 4)]}
    known = {("prefill", (("chunks", c), ("batch", b), ("pages", 8))): value for (c, b), value in sizes.items()}
    known |= {("decode", (("batch", b), ("speculative", 0), ("pages", 8))): 0.001 * b for b in (1, 4)}
    times = RecordedTimes(Costs.fixed(known).snapshot(), PLAN)
    assert times.seconds(prefill(1, 3)) == pytest.approx(0.005)
    assert times.seconds(prefill(2, 3)) == pytest.approx(0.007)  # never measured
    decode = Batch(rows=(DecodeRow(None, 0, [0]),) * 2, passes=3)
    assert times.seconds(decode) == pytest.approx(3 * 0.002)


def test_too_few_times_are_refused():
    times = RecordedTimes(CostTable({}), PLAN)
    with pytest.raises(ValueError, match="too few times of prefill: run the model first"):
        times.seconds(prefill(1))
    with pytest.raises(ValueError, match="whole on one device"):
        RecordedTimes(CostTable({}), dataclasses.replace(PLAN, way=Way.RING, stages=2))


def runner(**ways):
    catalogue = Catalogue.read()
    model, form = catalogue.model("llama-3.1-8b"), FORMATS[None]
    return Runner(
        model=model,
        device=catalogue.device("h200"),
        system=catalogue.system(model, form),
        ways=Ways(**ways),
        format=form,
    )


class Row:
    def __init__(self, tokens):
        self.token_ids = [0] * tokens


def rows(*lengths):
    return tuple(DecodeRow(Row(length), 0, [0]) for length in lengths)


def test_planned_times_are_the_planners():
    whole = PlannedTimes(runner())
    batch = Batch(chunks=(chunk(16), chunk(8, start=16)), rows=rows(10, 30))
    expected = [Tokens(count=24, sequences=1, context=(16 * 8 + 8 * 20) / 24), Tokens(count=2, sequences=2, context=20)]
    assert whole.seconds(batch) == pytest.approx(runner().stage(expected, rows=4).total)
    joined = Batch.of_lanes([batch, Batch(rows=rows(10))])
    assert whole.seconds(joined) == pytest.approx(whole.seconds(batch))


def test_planned_times_of_a_pipeline():
    ring = runner(pipeline=2)
    batch = Batch(rows=rows(10, 30), passes=3, micro_batches=2)
    one = Tokens(count=1, sequences=1, context=20)
    tick = (ring.stage([one], rows=1) + ring.hop(1)).total
    assert PlannedTimes(ring).seconds(batch) == pytest.approx(7 * tick)  # 3 passes of 2 micro-batches, and 1 to drain
