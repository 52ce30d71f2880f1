"""Lanes that run their steps together, each against a device of its own."""

import itertools
import sys
from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled import Costs
from jaxinfer.compiled.costs import Cost
from jaxinfer.generation.engine.batch import Batch, StepOutput
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.lanes import PREFIX_WEIGHT, LaneScheduler
from jaxinfer.generation.engine.output import OutputProcessor
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.passes import PIPELINE_PASSES
from jaxinfer.generation.engine.scheduler import DecoderScheduler
from jaxinfer.generation.engine.speculation import TRIES, PassCosts
from jaxinfer.generation.outputs import FinishReason
from tests.generation.engine.test_scheduler import CONTEXT, MAX_STEPS, PAGE, Device, alone, random_prompt, request_of


class Simulation:
    """The engine's loop around the schedulers of some lanes."""

    def __init__(self, random, lanes, *, slots=2, pages=12, passes=4, speculative=0, in_flight=1, adapters=None):
        self.config = EngineConfig(
            max_batch=slots,
            context=CONTEXT,
            page_size=PAGE,
            chunk_size=8,
            max_decode_passes=passes,
            num_speculative_tokens=speculative,
        )
        buckets, arrivals = Buckets.from_config(self.config), itertools.count()
        quick = {("decode", (("batch", rows), ("speculative", 0))): 1e-9 for rows in buckets.decode_rows}
        costs = PassCosts(Costs.fixed(quick), speculative)
        self.scheduler = LaneScheduler(
            DecoderScheduler(self.config, buckets, PagePool(pages, PAGE), adapters, costs=costs, arrivals=arrivals)
            for _ in range(lanes)
        )
        self.devices = [Device(random) for _ in range(lanes)]
        self.outputs, self.in_flight = OutputProcessor(itertools.count().__next__), in_flight
        self.steps, self.sequences, self.batches, self.uploads = deque(), [], [], []

    def add(self, prompt, **options):
        request = request_of(str(len(self.sequences)), prompt, **options)
        self.scheduler.check(request)
        made = request.sequences()
        for sequence in made:
            self.scheduler.add(sequence)
        self.sequences += made
        return made[0]

    def lane_of(self, sequence):
        return next(i for i, lane in enumerate(self.scheduler.lanes) if lane.allocation(sequence))

    def step(self):
        """One step; False if there is nothing left to do."""
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check(batch)
        if batch:
            self.batches.append(batch)
            self.uploads += batch.adapter_uploads
            self.steps.append((batch, self.run(batch)))
        else:
            assert self.steps or not self.scheduler.sequences
        busy = bool(self.steps)
        while len(self.steps) > (self.in_flight if batch else 0):
            batch, output = self.steps.popleft()
            self.outputs.process(batch, output)
            self.scheduler.commit(batch, output)
            self.scheduler.check_integrity()
        return busy

    def check(self, batch):
        """The lanes fit into one program."""
        assert len(batch.lanes) == len(self.devices)
        if any(lane.chunks for lane in batch.lanes):
            assert all((lane.passes, lane.num_speculative_tokens) == (1, 0) for lane in batch.lanes if lane.rows)
        assert {lane.passes for lane in batch.lanes if lane.rows} <= {batch.passes}
        for lane in batch.lanes:
            assert len({row.slot for row in lane.rows}) == len(lane.rows)
            assert all(row.num_speculative_tokens <= lane.num_speculative_tokens for row in lane.rows)

    def run(self, batch):
        outputs = [iter(device.run(lane).outputs) for device, lane in zip(self.devices, batch.lanes, strict=True)]
        chunks = [next(made) for made, lane in zip(outputs, batch.lanes, strict=True) for _ in lane.chunks]
        return StepOutput(outputs=chunks + [result for made in outputs for result in made])

    def abort(self, sequence):
        for leaving in self.scheduler.remove(sequence.request_id):
            self.outputs.abort(leaving)
        self.scheduler.check_integrity()

    def finish(self):
        for _ in range(MAX_STEPS):
            if not self.step():
                break
        for sequence in self.sequences:
            assert sequence.finished
            if sequence.finish_reason is not FinishReason.ABORT:
                assert sequence.token_ids == alone(sequence)
            assert self.scheduler.allocation(sequence) is None
        for lane in self.scheduler.lanes:
            assert lane.pages.free == lane.pages.count


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_every_request_ends_with_the_text_it_has_alone(seed):
    random = Random(seed)
    simulation = Simulation(
        random,
        random.randint(1, 4),
        slots=random.randint(1, 3),
        pages=random.randint(8, 14),
        passes=random.randint(1, 5),
        speculative=random.choice([0, 0, 3]),
        in_flight=random.randint(0, 2),
    )
    for _ in range(random.randint(3, 20)):
        simulation.add(
            random_prompt(random),
            max_tokens=random.randint(1, 20),
            n=random.choice([1, 1, 3]),
            seed=random.randint(0, 5),
            priority=random.randint(-1, 1),
            prompt_logprobs=random.choice([None, None, 0]),
        )
        for _ in range(random.randint(0, 3)):
            simulation.step()
        victim = random.choice(simulation.sequences)
        if random.random() < 0.15 and not victim.finished:
            simulation.abort(victim)
        if random.random() < 0.05:  # what an engine does after a step that failed
            simulation.steps.clear()
            simulation.scheduler.restart()
            simulation.devices = [Device(random) for _ in simulation.devices]
    simulation.finish()


def test_sequences_go_to_the_lane_that_has_least_to_do():
    simulation = Simulation(Random(0), 3, slots=4, pages=40)
    lanes = [simulation.lane_of(simulation.add([number % 3] * 6)) for number in range(7)]
    assert lanes == [0, 1, 2, 0, 1, 2, 0]
    simulation.finish()


def test_a_cached_prefix_is_worth_some_sequences():
    simulation = Simulation(Random(0), 2, slots=16, pages=200)
    prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    simulation.add(prompt, max_tokens=1)
    simulation.finish()
    lanes = [simulation.lane_of(simulation.add(prompt)) for _ in range(2 * PREFIX_WEIGHT)]
    assert lanes[: PREFIX_WEIGHT - 1] == [0] * (PREFIX_WEIGHT - 1)
    assert 1 in lanes
    simulation.finish()


def test_a_lane_that_ends_early_does_not_shorten_the_steps_of_others():
    simulation = Simulation(Random(0), 2, slots=1, pages=12, in_flight=0)
    for max_tokens in (2, 30):
        simulation.add([0], max_tokens=max_tokens, stop_token_ids=())
    simulation.finish()
    rows = [[len(lane.rows) for lane in batch.lanes] for batch in simulation.batches]
    assert rows == [[1, 1]] + [[0, 1]] * 7
    assert [batch.passes for batch in simulation.batches] == [4] * 7 + [2]


@pytest.mark.parametrize("known", [4, 1])
def test_passes_are_those_of_the_lane_with_most_rows(known):
    """What it costs to run that many decides: the other lane's number of rows never runs by itself."""
    simulation = Simulation(Random(0), 2, slots=4, pages=80, in_flight=0)
    costs = PassCosts(Costs.fixed({("decode", (("batch", known), ("speculative", 0))): 1e-9}), 0)
    first, second = simulation.scheduler.lanes
    for lane in (first, second):
        lane.passes.costs = costs
    for number in range(5):
        simulation.add([number % 3], max_tokens=9, stop_token_ids=())
    second.hand_over(second.waiting.first, first)
    simulation.finish()
    assert [len(lane.rows) for lane in simulation.batches[0].lanes] == [4, 1]
    assert [batch.passes for batch in simulation.batches] == ([4, 4, 1] if known == 4 else [1] * 9)


@pytest.mark.parametrize("quicker", [1, 2])
def test_lanes_of_stages_go_in_equally_many_micro_batches(quicker):
    """What the lane with most rows goes the fastest in decides for all: one row by itself is never divided."""
    simulation = Simulation(Random(0), 2, slots=4, pages=80, in_flight=0)
    known = {}
    for micro_batches in (1, 2):
        sizes = {"chunks": 0, "batch": 4, "speculative": 0, "micro_batches": micro_batches}
        cost = known["ring", tuple(sizes.items())] = Cost()
        for _ in range(TRIES):
            seconds = 1e-9 if micro_batches == quicker else 1e-3
            cost.add(seconds, 1, seconds)
    first, second = simulation.scheduler.lanes
    for lane in (first, second):
        lane.passes.costs = PassCosts(Costs(known, learns=False), 0, name="ring", stages=2)
    for number in range(5):
        simulation.add([number % 3], max_tokens=9, stop_token_ids=())
    second.hand_over(second.waiting.first, first)
    simulation.finish()
    assert [len(lane.rows) for lane in simulation.batches[0].lanes] == [4, 1]
    assert [batch.micro_batches for batch in simulation.batches] == [quicker] * 3
    assert [{lane.micro_batches for lane in batch.lanes} for batch in simulation.batches] == [{quicker}] * 3


def test_steps_through_a_pipeline_have_enough_passes_to_fill_it():
    """However long a pass takes, once it is known."""
    simulation = Simulation(Random(0), 2, slots=1, pages=80, in_flight=0, passes=16)
    sizes = {"chunks": 0, "batch": 1, "speculative": 0, "micro_batches": 1}
    slow = Costs.fixed({("ring", tuple(sizes.items())): 1.0})
    for lane in simulation.scheduler.lanes:
        lane.passes.costs = PassCosts(slow, 0, name="ring", stages=2)
    simulation.add([1], max_tokens=20, stop_token_ids=())
    simulation.finish()
    assert [batch.passes for batch in simulation.batches] == [
        PIPELINE_PASSES,
        PIPELINE_PASSES,
        20 - 2 * PIPELINE_PASSES,
    ]


def test_a_lane_without_pages_runs_fewer_passes_in_all():
    simulation = Simulation(Random(0), 2, slots=2, pages=8, in_flight=0)
    for tokens in (13, 8, 12):  # the first and the last share a lane's eight pages, and need six each at their ends
        simulation.add([0] * tokens, max_tokens=12, stop_token_ids=())
    simulation.finish()
    assert simulation.scheduler.load.preemptions
    short = [batch for batch in simulation.batches if batch.passes < 4 and all(lane.rows for lane in batch.lanes)]
    assert short


def test_what_waits_for_a_slot_moves_to_a_free_lane():
    simulation = Simulation(Random(0), 2, slots=1, pages=12, in_flight=0, passes=1)
    simulation.add([0], max_tokens=25, stop_token_ids=())
    simulation.add([1], max_tokens=2, stop_token_ids=())
    waiting = [simulation.add([2], max_tokens=2, stop_token_ids=(), seed=seed) for seed in range(4)]
    assert [simulation.lane_of(sequence) for sequence in waiting] == [0, 1, 0, 1]
    for _ in range(12):
        simulation.step()
    assert [sequence.finished for sequence in simulation.sequences] == [False] + [True] * 5
    simulation.finish()


def test_what_waits_for_pages_moves_to_a_lane_that_has_them():
    simulation = Simulation(Random(0), 2, slots=3, pages=8, in_flight=0, passes=1)
    first, second = simulation.scheduler.lanes
    sequences = [simulation.add([number] * 10, max_tokens=20, stop_token_ids=()) for number in range(2)]
    second.hand_over(second.waiting.first, first)
    while not first.preemptions:
        simulation.step()
    assert simulation.lane_of(sequences[1]) == 0
    simulation.step()
    assert simulation.lane_of(sequences[1]) == 1
    assert second.allocation(sequences[1]).running
    simulation.finish()
    assert simulation.scheduler.load.preemptions == 1


def test_a_sequence_keeps_its_place_when_it_moves():
    simulation = Simulation(Random(0), 2, slots=1, pages=12)
    for number in range(4):
        sequence = simulation.add([number % 3], priority=-number)
    (first, second), order = simulation.scheduler.lanes, simulation.scheduler.allocation(sequence).order
    assert second.allocation(sequence) is second.waiting.first
    second.hand_over(second.waiting.first, first)
    assert first.waiting.first.sequence is sequence
    assert first.waiting.first.order == order
    simulation.scheduler.check_integrity()
    simulation.finish()


def test_an_interrupted_move_loses_nothing():
    """It may end when a sequence is in both lanes."""
    simulation = Simulation(Random(0), 2, slots=1, pages=12)
    for number in range(3):
        simulation.add([number], max_tokens=3, stop_token_ids=())
    first, second = simulation.scheduler.lanes
    second._enter(first.waiting.first)
    assert len(simulation.scheduler.sequences) == 4
    simulation.scheduler.restart()
    simulation.scheduler.check_integrity()
    simulation.finish()


def test_a_lane_that_fails_to_schedule_leaves_what_a_restart_mends():
    simulation = Simulation(Random(0), 2, slots=2, pages=12)
    for number in range(4):
        simulation.add([number % 3] * 5, max_tokens=6)
    simulation.step()
    broken = simulation.scheduler.lanes[1]
    broken._buckets, buckets = None, broken._buckets
    with pytest.raises(AttributeError):
        simulation.scheduler.schedule()
    broken._buckets = buckets
    simulation.steps.clear()
    simulation.scheduler.restart()
    simulation.scheduler.check_integrity()
    simulation.devices = [Device(Random(0)) for _ in simulation.devices]
    simulation.finish()


def test_lanes_share_adapters(adapters):
    simulation = Simulation(Random(0), 2, slots=2, pages=24, adapters=adapters)
    for name in ("one", "one", None, "other", "other"):
        simulation.add([0, 1, 2] * 3, adapter=name)
    for _ in range(2):
        simulation.step()
    assert [[a.sequence.params.adapter for a in lane.running] for lane in simulation.scheduler.lanes] == [
        ["one", None],
        ["one"],
    ]
    simulation.finish()
    adapters.check_integrity()
    assert [index for index, _ in simulation.uploads] == [1, 1]  # each once, for both lanes


def test_an_adapter_gets_its_place_though_another_lane_has_more_for_the_one_before(adapters):
    simulation = Simulation(Random(0), 2, slots=2, pages=24, adapters=adapters)

    def add(name):
        return simulation.add([0, 1], adapter=name, max_tokens=8, stop_token_ids=())

    sequences = [add("one"), add("other")]
    for _ in range(40):
        sequences.append(add("one"))
        simulation.step()
        if sequences[1].finished:
            break
    assert sequences[1].finished
    assert not all(sequence.finished for sequence in sequences)
    simulation.finish()


def test_no_lane_waits_for_a_file_while_another_runs(adapters, monkeypatch):
    waits, pin = [], adapters.pin

    def noted(name, *, wait):
        waits.append((name, wait))
        return pin(name, wait=wait)

    monkeypatch.setattr(adapters, "pin", noted)
    simulation = Simulation(Random(0), 2, slots=1, pages=12, adapters=adapters)
    simulation.add([0], max_tokens=8, stop_token_ids=())
    simulation.add([1], adapter="one", max_tokens=2, stop_token_ids=())
    simulation.step()
    assert waits == [("one", False)]
    simulation.finish()


def test_a_request_that_cannot_run_ends_though_the_next_lane_fails(adapters, monkeypatch):
    simulation = Simulation(Random(0), 2, adapters=adapters)
    broken, fine = simulation.add([0, 1], adapter="broken"), simulation.add([1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(simulation.scheduler.lanes[1], "_buckets", None)
        with pytest.raises(AttributeError):
            simulation.scheduler.schedule()
    simulation.scheduler.restart()
    (failure,) = simulation.scheduler.schedule().failures
    assert failure.sequence is broken
    simulation.scheduler.restart()
    while simulation.step():
        pass
    assert fine.token_ids == alone(fine)


def test_a_step_does_not_refer_to_itself():
    """Otherwise its blocks of pages would stay until Python collects it."""
    step = Batch()
    before = sys.getrefcount(step)
    assert step.lanes == (step,)
    assert sys.getrefcount(step) == before
