"""The queue of what waits, against a sorted list; and that many requests cost no more each than a few do."""

import itertools
from random import Random

import pytest

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.batch import SequenceOutput, StepOutput
from jaxinfer.generation.engine.buckets import Buckets, EncoderBuckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.encoder_scheduler import EncoderScheduler
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.scheduler import DecoderScheduler
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.engine.waiting import WaitingQueue
from jaxinfer.generation.params import PoolingParams, SamplingParams

MANY = 2000


class Item:
    """Something in a queue; counts how often its place is asked for."""

    asked = 0

    def __init__(self, order):
        self._order = order

    @property
    def order(self):
        Item.asked += 1
        return self._order


def new_queue():
    return WaitingQueue(lambda item: item.order)


@pytest.mark.parametrize("seed", range(20))
def test_items_leave_in_order_or_at_any_time(seed):
    random = Random(seed)
    queue, expected, arrivals = new_queue(), [], itertools.count()
    gone: list[Item] = []
    for _ in range(400):
        match random.choice(("add", "add", "first", "any", "again")):
            case "add":
                item = Item((random.randint(0, 20), next(arrivals)))
                queue.add(item)
                expected.append(item)
            case "first" if expected:
                gone.append(expected.pop(0))
                queue.remove(gone[-1])
            case "any" if expected:
                gone.append(expected.pop(random.randrange(len(expected))))
                queue.remove(gone[-1])
            case "again" if gone:
                item = gone.pop(random.randrange(len(gone)))
                queue.add(item)
                expected.append(item)
        expected.sort(key=lambda item: item.order)
        assert list(queue) == expected
        assert len(queue) == len(expected)
        assert queue.first is (expected[0] if expected else None)


@pytest.mark.parametrize("shuffled", [False, True])
def test_what_has_left_is_forgotten(shuffled):
    """Also where the first stays, so that nothing leaves from the front."""
    queue, items = new_queue(), [Item((place, place)) for place in range(100)]
    for item in items:
        queue.add(item)
    leaving = items[:0:-1]
    if shuffled:
        Random(0).shuffle(leaving)
    for left, item in enumerate(leaving, 1):
        queue.remove(item)
        assert len(queue._heap) <= 2 * (len(items) - left)


def test_the_first_few_cost_no_more_than_they_are():
    class Place(int):
        compared = 0

        def __lt__(self, other):
            Place.compared += 1
            return int(self) < int(other)

    queue = new_queue()
    for place in range(MANY):
        queue.add(Item((Place(place), place)))
    Place.compared = 0
    assert [item.order[1] for item in itertools.islice(queue, 8)] == list(range(8))
    assert Place.compared < 200


def encoder_scheduler():
    config = EngineConfig(max_batch=4, context=64, token_budget=256)
    return EncoderScheduler(config, EncoderBuckets.from_config(config))


def decoder_scheduler():
    config = EngineConfig(max_batch=4, context=64, page_size=4)
    return DecoderScheduler(
        config, Buckets.from_config(config), PagePool(64, config.page_size), costs=PassCosts(Costs(), 0)
    )


def sequences_of(count, params):
    random = Random(0)
    requests = [
        Request(
            request_id=str(index),
            prompt=None,
            prompt_token_ids=(1,) * random.randint(1, 60),
            params=params,
            max_length=64,
        )
        for index in range(count)
    ]
    return [sequence for request in requests for sequence in request.sequences()]


@pytest.fixture
def looks(monkeypatch):
    """How often a sequence was looked at: its name, the length of its prompt, or whether it is another one."""
    count = itertools.count()
    monkeypatch.setattr(Sequence, "__eq__", lambda self, other: (next(count), self is other)[1])
    monkeypatch.setattr(Sequence, "__hash__", object.__hash__)
    for name in ("request_id", "num_prompt_tokens"):
        read = getattr(Sequence, name).fget
        monkeypatch.setattr(Sequence, name, property(lambda self, read=read: (next(count), read(self))[1]))
    return lambda: next(count)


@pytest.mark.parametrize(
    ("make", "params"), [(encoder_scheduler, PoolingParams()), (decoder_scheduler, SamplingParams())]
)
def test_a_request_is_found_without_looking_through_all(looks, make, params):
    scheduler, sequences = make(), sequences_of(MANY, params)
    for sequence in sequences:
        scheduler.add(sequence)
    for sequence in Random(1).sample(sequences, len(sequences)):
        assert scheduler.remove(sequence.request.request_id) == [sequence]
    assert scheduler.remove("0") == []
    scheduler.check_integrity()
    assert looks() < 20 * MANY


def test_an_encoders_batch_is_found_without_looking_through_all(looks):
    scheduler, sequences = encoder_scheduler(), sequences_of(MANY, PoolingParams())
    for sequence in sequences:
        scheduler.add(sequence)
    found = []
    while batch := scheduler.schedule():
        found += batch.sequences
    assert set(found) == set(sequences)
    assert looks() < 20 * MANY


def test_what_runs_waits_again_after_a_restart():
    scheduler, sequences = encoder_scheduler(), sequences_of(20, PoolingParams())
    for sequence in sequences:
        scheduler.add(sequence)
    first, second = scheduler.schedule().sequences, scheduler.schedule().sequences
    scheduler.remove(first[0].request_id)
    scheduler.restart()
    scheduler.check_integrity()
    found = []
    while batch := scheduler.schedule():
        found += batch.sequences
    assert set(found) == set(sequences) - {first[0]}
    assert found[0] is min((*first[1:], *second), key=sequences.index)


def test_a_step_copies_no_pages():
    """A row has its sequence's own list of pages, which is replaced, and never changed, when it grows."""
    scheduler = decoder_scheduler()
    (sequence,) = sequences_of(1, SamplingParams(max_tokens=40))
    scheduler.add(sequence)
    seen = []
    for _ in range(20):
        batch = scheduler.schedule()
        scheduler.commit(batch, StepOutput(outputs=[SequenceOutput()] * len(batch.parts)))
        sequence.token_ids.append(1)
        seen += [(row.pages, list(row.pages)) for row in batch.rows]
        assert all(row.pages is scheduler.allocation(sequence).pages for row in batch.rows)
    assert all(list(pages) == before for pages, before in seen)
    assert len({id(pages) for pages, _ in seen}) == len({len(pages) for pages, _ in seen}) >= 2
