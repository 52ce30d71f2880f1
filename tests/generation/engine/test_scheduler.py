"""The scheduler against a device that keeps, for every place in the cache, the text up to there."""

import functools
import itertools
from collections import deque
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled import Costs
from jaxinfer.futures import InterruptibleFuture
from jaxinfer.generation.engine.batch import PageBlock, SequenceOutput, StateBlock, StepOutput
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import SNAPSHOTS_PER_SEQUENCE, EngineConfig
from jaxinfer.generation.engine.host_pages import HostPages
from jaxinfer.generation.engine.output import OutputProcessor
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.restoring import Restoring
from jaxinfer.generation.engine.scheduler import PRIORITY_WEIGHT, DecoderScheduler
from jaxinfer.generation.engine.snapshots import Snapshots
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.engine.state_pages import StatePages
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import SamplingParams

MAX_STEPS = 2000
STOP = 3  # ids are 0 to 3
PAGE = 4
CONTEXT = 32


def following(text, seed):
    """The token after a text."""
    return hash((tuple(text), seed)) % 7 % 4


def alone(sequence):
    """The whole text of a request that nothing disturbs."""
    ids = list(sequence.request.prompt_token_ids)
    while True:
        ids.append(following(ids, sequence.seed))
        if ids[-1] in sequence.request.stop_token_ids or len(ids) == sequence.max_length:
            return ids


def request_of(request_id, prompt, *, max_tokens=4, n=1, seed=0, stop_token_ids=(STOP,), **params):
    return Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, n=n, **params),
        max_length=min(CONTEXT, len(prompt) + max_tokens),
        stop_token_ids=stop_token_ids,
        seed=seed,
    )


class States:
    """Recurrent states, on texts: a slot or a snapshot holds its adapter and the text that has gone into it."""

    def __init__(self):
        self.slots, self.snapshots = {}, {}

    def save(self, batch):
        for slot, place in batch.snapshots:
            self.snapshots[place] = self.slots[slot]

    def use(self, batch):
        for place, slot in batch.used_snapshots:
            self.slots[slot] = self.snapshots[place]

    def move(self, part, text, start, stop):
        """Move a slot's state on by the tokens from start to stop."""
        adapter = part.sequence.params.adapter
        assert start == 0 or self.slots[part.slot] == (adapter, tuple(text[:start]))
        self.slots[part.slot] = adapter, tuple(text[:stop])


ID = np.empty((1, 1), np.int64)
"""The shape of what the tier keeps of a page and of a state: a number for its texts."""


class Worker:
    """Does at once what a tier's thread does later, and says so late; every tenth read fails."""

    def __init__(self, random):
        self.random = random

    def submit(self, call, *arguments):
        fails = getattr(call, "func", None) is not None and self.random.random() < 0.1
        return Late(fail if fails else functools.partial(call, *arguments), self.random)


class Late(InterruptibleFuture):
    def __init__(self, call, random):
        super().__init__(call)
        self.run()
        self.random = random

    def done(self):
        return self.random.random() < 0.5


def fail():
    raise OSError("injected")


class Device:
    """What the programs do, on texts: a place of the cache holds its adapter and the text up to it.

    Writing outside a sequence's pages is an IndexError; what is read must be what was written.

    Attributes:
      states: the recurrent states; None: the model has none.
    """

    states = None

    def __init__(self, random):
        self.random = random
        self.cache: dict[tuple[int, int], tuple] = {}
        self.texts: dict[int, list[int]] = {}
        self.active: dict[int, bool] = {}
        self.kept = []  # what has come to the host, by the numbers that the tier has

    def run(self, batch):
        """Returns the new tokens of `batch.parts`, as a StepOutput."""
        if self.states is not None:
            self.states.save(batch)
        stored = self._store(batch)
        read = [[(target, at, self.cache.get((source, at))) for at in range(PAGE)] for source, target in batch.copies]
        for target, at, text in itertools.chain(*read):
            self.cache[target, at] = text
        for pages, block in batch.restored:
            for page, (number,) in zip(pages, block.kv[0][0], strict=True):
                if page >= 0:
                    self.cache.update({(page, at): text for at, text in enumerate(self.kept[number])})
        for place, block, _ in batch.restored_states:
            self.states.snapshots[place] = self.kept[block.arrays[0].item()]
        if self.states is not None:
            self.states.use(batch)
        for admission in batch.admissions:
            self.texts[admission.slot] = list(admission.token_ids)
            self.active[admission.slot] = admission.decodes
        tokens = self._prefill(batch) if batch.chunks else self._decode(batch)
        return StepOutput(outputs=[SequenceOutput(token_ids=ids) for ids in tokens], stored=[stored])

    def _store(self, batch):
        """Blocks with the numbers of what the batch stores."""
        first = len(self.kept)
        self.kept += [[self.cache.get((page, at)) for at in range(PAGE)] for page, _ in batch.stored]
        pages = np.arange(first, len(self.kept)).reshape(1, -1, 1)
        states = [self.states.snapshots[place] for place, _ in batch.stored_states]
        self.kept += states
        numbers = range(len(self.kept) - len(states), len(self.kept))
        return [PageBlock((pages,)), *(StateBlock((np.full((1, 1, 1), number),)) for number in numbers)]

    def _prefill(self, batch):
        active = [self.active[row.slot] for row in batch.rows]
        for chunk in batch.chunks:
            self._write(chunk, chunk.start, chunk.start + chunk.count)
        for row in itertools.compress(batch.rows, active):
            self._write(row, len(self.texts[row.slot]) - 1, len(self.texts[row.slot]))
        for chunk in batch.chunks:
            self._read(chunk, chunk.start + chunk.count)
        tokens = [self._token(chunk) if chunk.last else [] for chunk in batch.chunks]
        for row, going in zip(batch.rows, active, strict=True):
            if going:
                self._read(row, len(self.texts[row.slot]))
            tokens.append(self._token(row) if going else [])
        return tokens

    def _decode(self, batch):
        tokens = [[] for _ in batch.rows]
        for _, (row, made) in itertools.product(range(batch.passes), zip(batch.rows, tokens, strict=True)):
            if not self.active[row.slot]:
                continue
            text = self.texts[row.slot]
            limit = min(row.num_speculative_tokens, row.sequence.max_length - len(text) - 1)
            speculative = self.random.randint(0, limit)
            self._write(row, len(text) - 1, len(text))
            self._read(row, len(text))
            for at in range(len(text), len(text) + speculative):  # wrong tokens leave rubbish, which is written over
                self._place(row, at, "rubbish")
            accepted = self.random.randint(0, speculative)
            for token in range(1 + accepted):
                if self.active[row.slot]:
                    made += self._token(row)
                    if token:
                        self._write(row, len(text) - 2, len(text) - 1)
        return tokens

    def _place(self, part, at, what):
        self.cache[part.pages[at // PAGE], at % PAGE] = what

    def _write(self, part, start, stop):
        if self.states is not None and start < stop:
            self.states.move(part, self.texts[part.slot], start, stop)
        for at in range(start, stop):
            self._place(part, at, (part.sequence.params.adapter, tuple(self.texts[part.slot][: at + 1])))

    def _read(self, part, count):
        for at in range(count):
            found = self.cache[part.pages[at // PAGE], at % PAGE]
            assert found == (part.sequence.params.adapter, tuple(self.texts[part.slot][: at + 1]))

    def _token(self, part):
        text, request = self.texts[part.slot], part.sequence.request
        text.append(following(text, part.sequence.seed))
        self.active[part.slot] = text[-1] not in request.stop_token_ids and len(text) < request.max_length
        return [text[-1]]


class Simulation:
    """The engine's loop around a scheduler; checks every batch that it makes."""

    def __init__(
        self,
        random,
        *,
        slots=3,
        pages=12,
        passes=4,
        speculative=0,
        in_flight=1,
        adapters=None,
        costs=None,
        step_seconds=0.01,
        states=False,
        host_pages=0,
        **config,
    ):
        options = {"chunk_size": 8, "max_decode_passes": passes, "num_speculative_tokens": speculative} | config
        self.config = EngineConfig(max_batch=slots, context=CONTEXT, page_size=PAGE, **options)
        buckets = Buckets.from_config(self.config, moves=(2, 4))
        pool = PagePool(pages, PAGE, (lambda root: repr(root).encode()) if host_pages else None)
        quick = {("decode", (("batch", rows), ("speculative", 0))): 1e-9 for rows in buckets.decode_rows}
        passes = PassCosts(costs or Costs.fixed(quick), speculative)
        size, snapshots, restoring = self.config.chunk_size, None, None
        if states:
            snapshots = Snapshots(SNAPSHOTS_PER_SEQUENCE * slots, pool, size, has_tier=host_pages > 0)
        if host_pages:
            with mock.patch("jaxinfer.generation.engine.host_pages.make_worker", return_value=Worker(random)):
                self.tier = HostPages(host_pages, PageBlock((ID,)), buckets, Costs())
            if random.random() < 0.5:  # as a disk does
                self.tier.wants_early = self.tier.wants
            of_states = StatePages(PageBlock((ID,)), StateBlock((ID,)), buckets) if states else None
            restoring = Restoring(pool, self.tier, passes, size, snapshots, of_states)
        self.scheduler = DecoderScheduler(
            self.config,
            buckets,
            pool,
            adapters,
            costs=passes,
            restoring=restoring,
            snapshots=snapshots,
            step_seconds=step_seconds,
        )
        self.outputs = OutputProcessor(itertools.count().__next__)
        self.device = Device(random)
        self.device.states = States() if states else None
        self.in_flight = in_flight
        self.steps = deque()
        self.sequences: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.computed: dict[Sequence, int] = {}  # of those that run: where the next chunk begins

    def add(self, prompt, **options):
        request = request_of(str(len(self.sequences)), prompt, **options)
        self.scheduler.check(request)
        made = request.sequences()
        for sequence in made:
            self.scheduler.add(sequence)
            self.sequences.append(sequence)
        return made[0]

    def running(self, sequence):
        allocation = self.scheduler.allocation(sequence)
        return allocation is not None and allocation.running

    def step(self):
        """One step; False if there is nothing left to do."""
        before = sorted(self.scheduler.running, key=lambda a: a.order)
        batch = self.scheduler.schedule()
        for failure in batch.failures:
            self.outputs.fail(failure.sequence, failure.message)
            self.failed.append(failure.sequence)
        self.check_preempted([a.sequence for a in before])
        if batch:
            self.check_batch(batch, before)
            self.steps.append((batch, self.device.run(batch)))
        else:
            assert self.steps or not (self.scheduler.running or self.scheduler.waiting)
        busy = bool(self.steps)
        self.collect(self.in_flight if batch else 0)
        return busy

    def collect(self, keep):
        while len(self.steps) > keep:
            batch, output = self.steps.popleft()
            made = {part.sequence: found.token_ids for part, found in zip(batch.parts, output.outputs, strict=True)}
            for sequence, _, most in batch.growth:
                assert len(made[sequence]) <= most
            self.outputs.process(batch, output)
            self.scheduler.commit(batch, output)
            self.scheduler.check_integrity()

    def check_preempted(self, before):
        """Those that lost their place are the last in order."""
        gone = [s for s in before if not self.running(s)]
        assert gone == before[len(before) - len(gone) :]
        for sequence in gone:
            del self.computed[sequence]

    def check_batch(self, batch, before):
        config = self.config
        for admission in batch.admissions:
            self.admitted.append(admission.sequence)
            self.computed[admission.sequence] = admission.num_cached_tokens
        for chunk in batch.chunks:
            assert chunk.start == self.computed[chunk.sequence]
            assert 1 <= chunk.count <= config.chunk_size
            if self.device.states is not None:  # whatever is cached
                assert chunk.start % config.chunk_size == 0
            self.computed[chunk.sequence] += chunk.count
            assert chunk.last == (self.computed[chunk.sequence] == len(chunk.sequence.token_ids))
        if batch.chunks:
            assert len(batch.chunks) * config.chunk_size <= config.token_budget
            assert sum(chunk.count for chunk in batch.chunks) <= config.token_budget
            assert (batch.passes, batch.num_speculative_tokens) == (1, 0)
        assert 1 <= batch.passes <= config.max_decode_passes
        assert batch.num_speculative_tokens in (0, config.num_speculative_tokens)
        rows = [self.scheduler.allocation(row.sequence) for row in batch.rows]
        assert len(set(rows)) == len(rows) <= config.max_batch
        assert not any(a.prefilling or not a.running for a in rows)
        if before:  # the first in order always runs, unless the steps in flight end it
            first = before[0]
            assert first.sequence in batch.sequences or first.max_remaining <= 0

    def abort(self, sequence):
        for gone in self.scheduler.remove(sequence.request_id):
            self.outputs.abort(gone)
        self.scheduler.check_integrity()
        self.forget_gone()

    def forget_gone(self):
        for gone in [s for s in self.computed if not self.running(s)]:
            del self.computed[gone]

    def finish(self):
        for _ in range(MAX_STEPS):
            if not self.step():
                break
            self.forget_gone()
        for sequence in self.sequences:
            assert sequence.finished
            if sequence.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
                assert sequence.token_ids == alone(sequence)
            assert self.scheduler.allocation(sequence) is None
        assert self.scheduler.pages.free == self.scheduler.pages.count
        assert not self.scheduler.waiting


BASES = [[0, 1, 2] * 8, [2, 1] * 12]


def random_prompt(random):
    """One that begins as others do, for some pages or a part of one."""
    return random.choice(BASES)[: random.randint(0, 22)] + random.choices([0, 1, 2], k=random.randint(1, 6))


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_every_request_ends_with_the_text_it_has_alone(seed):
    random = Random(seed)
    states = random.random() < 0.3
    simulation = Simulation(
        random,
        slots=random.randint(1, 4),
        pages=random.randint(8, 14),
        passes=random.randint(1, 5),
        speculative=0 if states else random.choice([0, 0, 3]),
        in_flight=random.randint(0, 2),
        token_budget=random.choice([8, 16, 64]),
        prefix_caching=states or random.random() < 0.7,
        states=states,
        host_pages=random.choice([0, 0, 12, 40, 200]),
    )
    for number in range(random.randint(3, 14)):
        if number == 3:  # later ones of a higher priority now get the orders of earlier ones
            simulation.scheduler._arrivals = itertools.count(number + PRIORITY_WEIGHT)
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
    simulation.finish()


def test_admission_is_by_priority_and_then_by_arrival():
    simulation = Simulation(Random(0), slots=1, pages=8)
    added = [simulation.add([0, 1], priority=priority) for priority in (0, 1, 0, -1, 1)]
    simulation.finish()
    assert [added.index(s) for s in simulation.admitted] == [3, 0, 2, 1, 4]


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_a_bounded_number_of_later_requests_overtakes_one(seed):
    random = Random(seed)
    simulation = Simulation(random, slots=2, pages=16)
    priority = {}
    for _ in range(6 * PRIORITY_WEIGHT):  # they come faster than they are served
        sequence = simulation.add([0, 1], max_tokens=2, priority=random.choice([0, 0, 0, 0, 0, 1, 2]))
        priority[sequence] = sequence.params.priority
        if random.random() < 0.7:
            simulation.step()
    simulation.finish()
    arrived = list(priority)
    place = {sequence: at for at, sequence in enumerate(simulation.admitted)}
    for at, sequence in enumerate(arrived):
        overtaking = [s for s in arrived[at + 1 :] if place[s] < place[sequence]]
        assert len(overtaking) <= PRIORITY_WEIGHT * priority[sequence]
        for s in overtaking:
            assert arrived.index(s) - at <= PRIORITY_WEIGHT * (priority[sequence] - priority[s])


def test_the_last_in_order_gives_way_and_comes_back():
    simulation = Simulation(Random(0), slots=2, pages=8, passes=1, in_flight=0)
    later, earlier = (simulation.add([0] * 10, max_tokens=20, stop_token_ids=(), priority=p) for p in (1, 0))
    while not simulation.scheduler.preemptions:
        assert simulation.step()
    assert [simulation.running(s) for s in (later, earlier)] == [False, True]
    simulation.finish()
    assert simulation.admitted.count(later) >= 2
    assert simulation.admitted.count(earlier) == 1


def test_completions_of_one_prompt_share_its_pages():
    simulation = Simulation(Random(0), slots=3, pages=30)
    simulation.add([0, 1, 2, 0, 1, 2, 0, 1, 2], n=3)  # two full pages, and one that each completes
    simulation.step()
    running = simulation.scheduler.running
    shared = {tuple(a.pages[:2]) for a in running}
    assert (len(running), len(shared), len({a.pages[2] for a in running})) == (3, 1, 3)
    simulation.finish()


def test_completions_of_one_prompt_begin_with_its_snapshot():
    simulation = Simulation(Random(0), slots=3, pages=30, states=True)
    for _ in range(2):
        simulation.add([0, 1, 2] * 7, n=3)
    simulation.finish()
    assert [s.num_cached_tokens for s in simulation.admitted] == [0, 16, 16, 16, 16, 16]


def test_a_conversation_goes_on_from_its_snapshot_and_others_from_what_they_share():
    simulation = Simulation(Random(0), slots=1, pages=30, states=True)
    system, rest = [0, 1, 2] * 4, [1, 1, 2, 2] * 3

    def cached(prompt):
        sequence = simulation.add(prompt, max_tokens=1)
        simulation.finish()
        return sequence.num_cached_tokens

    assert cached([*system, *rest]) == 0
    assert cached([*system, *rest, 0, 1, 0, 1]) == 16
    assert cached([*system, 2, 2, 2, 2, 2]) == 0  # which takes a snapshot where it leaves the others
    assert cached([*system, 0, 2, 2, 2, 2]) == 8


def test_a_request_that_could_never_run_is_refused():
    simulation = Simulation(Random(0), pages=4)
    simulation.add([0] * 10, max_tokens=7)  # the last token needs no place
    with pytest.raises(ValueError, match="18 tokens with max_tokens need 5 pages of 4 tokens; the cache has 4"):
        simulation.add([0] * 10, max_tokens=8)
    simulation.finish()


def test_requests_wait_for_a_slot_of_their_adapter(adapters):
    simulation = Simulation(Random(0), slots=3, pages=24, adapters=adapters)
    for name in ("one", "other", None, "one"):
        simulation.add([0, 1, 2] * 3, adapter=name)
    simulation.step()
    assert [a.sequence.params.adapter for a in simulation.scheduler.running] == ["one"]
    simulation.finish()
    assert [s.params.adapter for s in simulation.admitted] == ["one", "other", None, "one"]
    assert all(
        s.num_cached_tokens == 0 or s.params.adapter == "one" for s in simulation.admitted
    )  # none shares another's pages


def test_adapters_that_cannot_be_read_end_their_own_requests(adapters):
    simulation = Simulation(Random(0), adapters=adapters)
    broken = [simulation.add([0, 1], adapter="broken") for _ in range(2000)]
    fine = simulation.add([0, 1], adapter="one")
    simulation.finish()
    assert simulation.failed == broken
    assert fine.error is None
    assert all(s.finish_reason is FinishReason.ERROR and "adapter_model.safetensors" in s.error for s in broken)
    adapters.check_integrity()


class TimedDevice(Device):
    """Takes 2 ms for a plain pass, 2.4 for a speculative one, and finds every other speculative pass half right."""

    def __init__(self, random, costs, speculative):
        super().__init__(random)
        self.costs, self.decisions = PassCosts(costs, speculative), []

    def run(self, batch):
        output = super().run(batch)
        if batch.chunks:
            return output
        passes, speculative = batch.passes, batch.num_speculative_tokens
        self.decisions.append((passes, speculative))
        bucket, seconds = (("batch", len(batch.rows)), ("speculative", speculative)), 0.0024 if speculative else 0.002
        plain, drafting = (0, passes) if speculative else (passes, 0)
        self.costs.record(bucket, passes * seconds, plain=plain, speculative=drafting)
        drafted = {"num_draft_tokens": speculative * drafting, "num_accepted_tokens": drafting // 2}
        return StepOutput(outputs=[found._replace(**drafted) for found in output.outputs])


@pytest.mark.parametrize(("step_seconds", "passes"), [(0.001, 1), (0.0041, 2), (0.011, 5), (1.0, 8)])
def test_a_step_has_as_many_passes_as_its_time_holds(step_seconds, passes):
    costs = Costs.fixed({("decode", (("batch", 1), ("speculative", 0))): 0.002})
    simulation = Simulation(Random(0), slots=1, passes=8, in_flight=0, costs=costs, step_seconds=step_seconds)
    simulation.device = TimedDevice(Random(0), costs, 0)
    simulation.add([0, 1], max_tokens=30, stop_token_ids=())
    simulation.finish()
    assert [made for made, _ in simulation.device.decisions[:2]] == [passes, passes]


def test_a_restart_decides_like_the_process_before(tmp_path, monkeypatch):
    """From its first step on: it makes as many passes, and knows what a speculative one costs."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))

    def start():
        return Costs.open(device="device", model={"name": "model"})

    def run(costs):
        """What the decode steps of a request are: (passes, speculative tokens)."""
        simulation = Simulation(Random(0), slots=1, passes=8, speculative=2, in_flight=0, costs=costs)
        simulation.device = TimedDevice(Random(0), costs, 2)
        simulation.add([0, 1], max_tokens=30, stop_token_ids=())
        while simulation.step():
            pass
        return simulation.device.decisions

    first = start()
    unknown, *_, known = [run(first) for _ in range(5)]
    assert unknown[:2] == [(1, 2), (1, 0)]  # one pass to learn what it costs; nothing accepted, so no speculation
    assert known[0] == (5, 2)  # as many as 10 ms hold plain ones
    assert known[1][1] == 2  # half a token more for a fifth more time pays
    first.save()
    assert run(start()) == known
