"""The sequences that run: in order at any time, and a step looks only at those that it runs."""

from random import Random

import pytest

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.allocation import Allocation
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.engine.running import RunningSequences
from jaxinfer.generation.engine.scheduler import DecoderScheduler
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.params import SamplingParams


def sequence_of(name, prompt):
    params = SamplingParams(max_tokens=8)
    (sequence,) = Request(
        request_id=str(name), prompt=None, prompt_token_ids=prompt, params=params, max_length=len(prompt) + 8
    ).sequences()
    return sequence


@pytest.mark.parametrize("seed", range(5))
def test_they_are_in_order_whatever_comes_and_goes(seed):
    random, running, expected = Random(seed), RunningSequences(), []
    orders = random.sample(range(1000), 300)
    for order in orders:
        allocation = Allocation(sequence=sequence_of(order, (1, 2)), order=(order, order))
        allocation.prefilling = random.random() < 0.7
        allocation.sequence.matcher = "matcher" if random.random() < 0.1 else None
        running.add(allocation)
        expected.append(allocation)
        if random.random() < 0.5:
            running.remove(expected.pop(random.randrange(len(expected))))
        if running.prefilling and random.random() < 0.5:
            begins = random.choice(running.prefilling)
            begins.prefilling = False
            running.begin_decoding(begins)
        running.check_integrity()
        assert sorted(running, key=id) == sorted(expected, key=id)
        assert len(running) == len(expected)
        if expected:
            assert running.last is max(expected, key=lambda allocation: allocation.order)


def test_a_step_looks_only_at_the_prompts_that_it_computes(monkeypatch):
    """Not at all that are in prefill, or that wait: a thousand may."""
    looks = [0]

    def look(allocation):
        looks[0] += 1
        return vars(allocation)["num_prefilled_tokens"]

    config = EngineConfig(max_batch=256, context=64, page_size=16, chunk_size=16, token_budget=32)
    pool, costs = PagePool(2048, 16), PassCosts(Costs.fixed({}), 0)
    scheduler = DecoderScheduler(config, Buckets.from_config(config), pool, costs=costs)
    for name in range(500):
        scheduler.add(sequence_of(name, tuple(range(48))))
    numbers = property(look, lambda allocation, value: vars(allocation).update(num_prefilled_tokens=value))
    monkeypatch.setattr(Allocation, "num_prefilled_tokens", numbers)
    while scheduler._admit_next(wait=True, adapters_before=None):
        pass
    assert len(scheduler.running) == 256
    looks[0] = 0
    batch = scheduler.schedule()
    assert len(batch.chunks) == 2
    assert looks[0] < 50
