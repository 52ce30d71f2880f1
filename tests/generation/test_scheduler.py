"""The scheduler against a device that keeps, for every place in the cache, the text up to there."""

import itertools
from collections import deque
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.generation.adapters import AdapterSlots
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.pages import PagePool
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.request import FinishReason, Sequence
from jaxinfer.generation.scheduler import PRIORITY_WEIGHT, Scheduler
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG

MOST_STEPS = 2000
STOP = 3  # ids are 0 to 3
PAGE = 4
CONTEXT = 32


def following(text, seed):
    """The token after a text."""
    return hash((tuple(text), seed)) % 7 % 4


def alone(sequence, prompt):
    """The whole text of a request that nothing disturbs."""
    ids = list(prompt)
    while True:
        ids.append(following(ids, sequence.seed))
        if ids[-1] in sequence.stop_ids or len(ids) == sequence.limit:
            return ids


class Device:
    """What `programs` do, on texts: a place of the cache holds its adapter and the text up to it.

    Writing outside a sequence's pages is an IndexError; what is read must be what was written.
    """

    def __init__(self, random):
        self.random = random
        self.cache: dict[tuple[int, int], tuple] = {}
        self.texts: dict[int, list[int]] = {}
        self.active: dict[int, bool] = {}

    def run(self, batch):
        """Returns the new tokens of every sequence, in the order of `batch.growth`."""
        read = [[(target, at, self.cache.get((source, at))) for at in range(PAGE)] for source, target in batch.copies]
        for target, at, text in itertools.chain(*read):
            self.cache[target, at] = text
        for s in batch.admitted:
            self.texts[s.slot] = list(s.ids)
            self.active[s.slot] = not s.prefilling and s.computed < len(s.ids)
        if batch.pieces:
            return self._step(batch)
        return self._decode(batch)

    def _step(self, batch):
        active = [self.active[s.slot] for s in batch.rows]
        for piece in batch.pieces:
            self._write(piece.sequence, piece.start, piece.start + piece.count)
        for s in itertools.compress(batch.rows, active):
            self._write(s, len(self.texts[s.slot]) - 1, len(self.texts[s.slot]))
        for piece in batch.pieces:
            self._read(piece.sequence, piece.start + piece.count)
        tokens = [self._token(p.sequence) for p in batch.pieces if p.last]
        for s, going in zip(batch.rows, active, strict=True):
            if going:
                self._read(s, len(self.texts[s.slot]))
            tokens.append(self._token(s) if going else [])
        return tokens

    def _decode(self, batch):
        tokens = [[] for _ in batch.rows]
        for _, (s, made) in itertools.product(range(batch.steps), zip(batch.rows, tokens, strict=True)):
            if not self.active[s.slot]:
                continue
            text = self.texts[s.slot]
            drafts = min(self.random.randint(0, batch.drafts), s.limit - len(text) - 1)
            self._write(s, len(text) - 1, len(text))
            self._read(s, len(text))
            for at in range(len(text), len(text) + drafts):  # wrong drafts leave rubbish, which is written over
                self._place(s, at, "rubbish")
            accepted = self.random.randint(0, drafts)
            for _ in range(1 + accepted):
                if self.active[s.slot]:
                    made += self._token(s)
                    self._write(s, len(text) - 2, len(text) - 1)
        return tokens

    def _place(self, s, at, what):
        self.cache[s.pages[at // PAGE], at % PAGE] = what

    def _write(self, s, start, stop):
        for at in range(start, stop):
            self._place(s, at, (s.params.adapter, tuple(self.texts[s.slot][: at + 1])))

    def _read(self, s, count):
        for at in range(count):
            found = self.cache[s.pages[at // PAGE], at % PAGE]
            assert found == (s.params.adapter, tuple(self.texts[s.slot][: at + 1]))

    def _token(self, s):
        text = self.texts[s.slot]
        text.append(following(text, s.seed))
        self.active[s.slot] = text[-1] not in s.stop_ids and len(text) < s.limit
        return [text[-1]]


class Simulation:
    """The engine's loop around a scheduler; checks every batch that it makes."""

    def __init__(self, random, *, slots=3, pages=12, steps=4, drafts=0, in_flight=1, adapters=None, **config):
        self.config = EngineConfig(slots=slots, context=CONTEXT, page_size=PAGE, **{"piece_tokens": 8} | config)
        self.scheduler = Scheduler(self.config, PagePool(pages, PAGE), adapters)
        self.device = Device(random)
        self.steps, self.drafts, self.in_flight = steps, drafts, in_flight
        self.flights = deque()
        self.sequences: list[tuple[Sequence, list[int]]] = []
        self.admitted: list[Sequence] = []
        self.computed: dict[Sequence, int] = {}  # of those that run: where the next piece begins

    def add(self, prompt, *, max_tokens=4, n=1, seed=0, stop_ids=(STOP,), **params):
        options = SamplingParams(max_tokens=max_tokens, seed=0, n=n, **params)
        name, limit = str(len(self.sequences)), min(CONTEXT, len(prompt) + max_tokens)
        made = [
            Sequence(name, i, prompt, options, prompt=None, seed=seed + i, limit=limit, stop_ids=stop_ids, stream=None)
            for i in range(n)
        ]
        for sequence in made:
            self.scheduler.check(sequence)
            self.scheduler.add(sequence)
            self.sequences.append((sequence, prompt))
        return made[0]

    def step(self):
        """One step; False if there is nothing left to do."""
        before = sorted(self.scheduler.running, key=lambda s: s.order)
        batch = self.scheduler.schedule(self.steps, self.drafts)
        self.check_preempted(before)
        if batch is None:
            assert self.flights or not (self.scheduler.running or self.scheduler.waiting)
        else:
            self.check_batch(batch, before)
            self.flights.append((batch, self.device.run(batch)))
        busy = bool(self.flights)
        self.collect(self.in_flight if batch is not None else 0)
        return busy

    def collect(self, keep):
        while len(self.flights) > keep:
            batch, results = self.flights.popleft()
            for (sequence, _, most), tokens in zip(batch.growth(), results, strict=True):
                assert len(tokens) <= most
                for token in tokens:
                    if not sequence.finished:
                        sequence.append(token, None)
            self.scheduler.commit(batch)
            self.scheduler.check_integrity()

    def check_preempted(self, before):
        """Those that lost their place are the last in order."""
        gone = [s for s in before if s.slot < 0]
        assert gone == before[len(before) - len(gone) :]
        for sequence in gone:
            del self.computed[sequence]

    def check_batch(self, batch, before):
        config = self.config
        self.admitted += batch.admitted
        for sequence in batch.admitted:
            first = next((p.start for p in batch.pieces if p.sequence is sequence), None)
            self.computed[sequence] = sequence.computed if first is None else first
        for piece in batch.pieces:
            assert piece.start == self.computed[piece.sequence]
            assert 1 <= piece.count <= config.piece_tokens
            self.computed[piece.sequence] += piece.count
            assert piece.last == (self.computed[piece.sequence] == len(piece.sequence.ids))
        if batch.pieces:
            assert len(batch.pieces) * config.piece_tokens <= config.token_budget
            assert sum(p.count for p in batch.pieces) <= config.token_budget
            assert (batch.steps, batch.drafts) == (1, 0)
        assert 1 <= batch.steps <= self.steps
        assert batch.drafts in (0, self.drafts)
        assert len(set(batch.rows)) == len(batch.rows) <= config.slots
        assert not any(s.prefilling or s.slot < 0 for s in batch.rows)
        if before and len(before[0].ids) + before[0].least < before[0].limit + batch.steps:
            ends = len(before[0].ids) + before[0].least >= before[0].limit
            assert before[0] in batch.sequences or ends  # the first in order always runs

    def abort(self, sequence):
        self.scheduler.abort(sequence.request_id)
        self.scheduler.check_integrity()
        for gone in [s for s in self.computed if s.slot < 0]:
            del self.computed[gone]

    def finish(self):
        for _ in range(MOST_STEPS):
            if not self.step():
                break
            for sequence in [s for s in self.computed if s.slot < 0]:
                del self.computed[sequence]
        for sequence, prompt in self.sequences:
            assert sequence.finished
            if sequence.finish_reason is not FinishReason.ABORT:
                assert sequence.ids == alone(sequence, prompt)
            assert (sequence.least, sequence.most) == (0, 0)
        assert self.scheduler.pages.free == self.scheduler.pages.count
        assert not self.scheduler.waiting


BASES = [[0, 1, 2] * 8, [2, 1] * 12]


def random_prompt(random):
    """One that begins as others do, for some pages or a part of one."""
    return random.choice(BASES)[: random.randint(0, 22)] + random.choices([0, 1, 2], k=random.randint(1, 6))


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_every_request_ends_with_the_text_it_has_alone(seed):
    random = Random(seed)
    simulation = Simulation(
        random,
        slots=random.randint(1, 4),
        pages=random.randint(8, 14),
        steps=random.randint(1, 5),
        drafts=random.choice([0, 0, 3]),
        in_flight=random.randint(0, 2),
        token_budget=random.choice([8, 16, 64]),
        prefix_caching=random.random() < 0.7,
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
        victim, _ = random.choice(simulation.sequences)
        if random.random() < 0.15 and not victim.finished:
            simulation.abort(victim)
    simulation.finish()


def test_admission_is_by_priority_and_then_by_arrival():
    simulation = Simulation(Random(0), slots=1, pages=8)
    added = [simulation.add([0, 1], priority=priority) for priority in (0, 1, 0, -1, 1)]
    simulation.finish()
    assert [added.index(s) for s in simulation.admitted] == [3, 0, 2, 1, 4]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_only_so_many_later_requests_overtake_one(seed):
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
    simulation = Simulation(Random(0), slots=2, pages=8, steps=1, in_flight=0)
    later, earlier = (simulation.add([0] * 10, max_tokens=20, stop_ids=(), priority=p) for p in (1, 0))
    while not simulation.scheduler.preemptions:
        assert simulation.step()
    assert [s.slot >= 0 for s in (later, earlier)] == [False, True]
    simulation.finish()
    assert simulation.admitted.count(later) >= 2
    assert simulation.admitted.count(earlier) == 1


def test_completions_of_one_prompt_share_its_pages():
    simulation = Simulation(Random(0), slots=3, pages=30)
    simulation.add([0, 1, 2, 0, 1, 2, 0, 1, 2], n=3)  # two full pages, and one that each completes
    simulation.step()
    running = simulation.scheduler.running
    shared = {tuple(s.pages[:2]) for s in running}
    assert (len(running), len(shared), len({s.pages[2] for s in running})) == (3, 1, 3)
    simulation.finish()


def test_a_request_that_could_never_run_is_refused():
    simulation = Simulation(Random(0), pages=4)
    simulation.add([0] * 10, max_tokens=7)  # the last token needs no place
    with pytest.raises(ValueError, match="18 tokens with max_tokens need 5 pages of 4 tokens; the cache has 4"):
        simulation.add([0] * 10, max_tokens=8)
    simulation.finish()


@pytest.fixture
def adapters(tmp_path):
    """One slot for two adapters, and a third that cannot be read."""
    slots = AdapterSlots(1, 4, 1 << 20, "tiny", CONFIG)
    for name in ("one", "other", "broken"):
        pair = random_pair(32, 32, 2, np.random.default_rng(0))
        slots.register(name, save_adapter(tmp_path / name, {"model.layers.0.self_attn.q_proj": pair}))
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    return slots


def test_requests_wait_for_a_slot_of_their_adapter(adapters):
    simulation = Simulation(Random(0), slots=3, pages=24, adapters=adapters)
    for name in ("one", "other", None, "one"):
        simulation.add([0, 1, 2] * 3, adapter=name)
    simulation.step()
    assert [s.params.adapter for s in simulation.scheduler.running] == ["one"]
    simulation.finish()
    assert [s.params.adapter for s in simulation.admitted] == ["one", "other", None, "one"]
    assert all(s.cached == 0 or s.params.adapter == "one" for s in simulation.admitted)  # none shares another's pages


def test_adapters_that_cannot_be_read_end_their_own_requests(adapters):
    simulation = Simulation(Random(0), adapters=adapters)
    broken = [simulation.add([0, 1], adapter="broken") for _ in range(2000)]
    fine = simulation.add([0, 1], adapter="one")
    simulation.sequences = [(fine, [0, 1])]
    simulation.finish()
    assert simulation.scheduler.dropped == broken
    assert all(s.finish_reason is FinishReason.ERROR and "adapter_model.safetensors" in s.error for s in broken)
    adapters.check_integrity()
