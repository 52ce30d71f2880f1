"""Random requests that come, wait, give way and are given up: each ends once, with the text it has alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxinfer.compiled import enable_persistent_cache
from jaxinfer.generation.engine import Engine
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.request import FinishReason
from jaxinfer.generation.structured import Structure
from jaxinfer.generation.text import Tokenizer
from jaxinfer.models.loading import load_model
from tests.generation.conftest import SMALL_CONFIG, SMALL_PAGES

MOST_STEPS = 2000


class Alone:
    """Runs every sequence by itself on an empty cache, once."""

    def __init__(self, engine):
        self.engine, self._known = engine, {}

    def expected(self, prompt, params):
        """The sequences of a request."""
        key = repr((prompt, params))
        if key not in self._known:
            self._known[key] = self.engine.prepare(prompt, params)
            for sequence in self._known[key]:
                self._run(sequence)
        return self._known[key]

    def _run(self, sequence):
        self.engine.scheduler.pages.clear()
        self.engine.add([sequence])
        while not sequence.finished:
            self.engine.step()
        self.engine.drain()


def reset(engine, *, overlap):
    """Make it idle, with an empty cache."""
    for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(sequence.request_id)
    engine.drain()
    engine.scheduler.pages.clear()
    engine.config = dataclasses.replace(engine.config, overlap=overlap)


BASES = [np.random.default_rng(seed).integers(97, 105, 40).tolist() for seed in range(2)]
prompts = st.builds(
    lambda base, count, tail: BASES[base][:count] + tail,
    st.integers(0, 1),
    st.sampled_from([0, 5, 16, 19, 30, 40]),
    st.lists(st.integers(97, 99), min_size=1, max_size=3),
)
choices = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
        {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 1},
        {"temperature": 0.7, "logit_bias": dict.fromkeys(range(97, 103), 6.0), "stop_ids": (100,)},
        {"temperature": 0.7, "logit_bias": dict.fromkeys(range(97, 103), 6.0), "stop": ("ab", "c")},
        {"temperature": 0.0, "logit_bias": dict.fromkeys((97, 98), 30.0)},  # repeats itself: drafts are right
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 1.0, "structure": Structure(regex="[ab]{2,30}c")},
    ]
)
requests = st.builds(
    lambda prompt, choice, **params: (prompt, SamplingParams(**choice, **params)),
    prompts,
    choices,
    max_tokens=st.sampled_from([1, 6, 20, 60]),
    n=st.sampled_from([1, 1, 1, 3]),
    seed=st.integers(0, 1),
    priority=st.integers(-1, 1),
    ignore_eos=st.booleans(),
)


class Machine(RuleBasedStateMachine):
    def __init__(self, engine, alone):
        super().__init__()
        self.engine, self.alone = engine, alone
        self.requests = []
        self.ended = {}  # sequence -> its tokens when it was first seen to have ended

    @initialize(overlap=st.booleans())
    def begin(self, overlap):
        """With two requests that do not fit beside each other to their ends: one must give way."""
        reset(self.engine, overlap=overlap)
        for base in BASES:
            self.add((base[:30], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)))

    @rule(request=requests)
    def add(self, request):
        sequences = self.engine.prepare(*request)
        self.engine.add(sequences)
        self.requests.append((*request, sequences))

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            for sequence in self.engine.step():
                if sequence.finished:
                    self.ended.setdefault(sequence, (sequence.finish_reason, list(sequence.ids)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        *_, sequences = data.draw(st.sampled_from(self.requests[-4:]))
        running = [s for s in sequences if not s.finished]
        self.engine.abort(sequences[0].request_id)
        assert all(s.finish_reason is FinishReason.ABORT for s in running)
        self.ended.update({s: (s.finish_reason, list(s.ids)) for s in running})

    @invariant()
    def all_fits_together(self):
        self.engine.scheduler.check_integrity()

    def teardown(self):
        scheduler = self.engine.scheduler
        for _ in range(MOST_STEPS):
            if not (scheduler.running or scheduler.waiting):
                break
            self.step(1)
            self.all_fits_together()
        self.engine.drain()
        assert scheduler.pages.free == scheduler.pages.count
        assert len(scheduler._slots) == self.engine.config.slots
        for prompt, params, sequences in self.requests:
            for sequence, expected in zip(sequences, self.alone.expected(prompt, params), strict=True):
                assert self.ended[sequence] == (sequence.finish_reason, sequence.ids)
                assert (sequence.least, sequence.most) == (0, 0)
                check_same(sequence, expected)


def check_same(sequence, expected):
    count = len(sequence.ids)
    assert sequence.ids == expected.ids[:count]
    if sequence.finish_reason is FinishReason.ABORT:
        return
    assert (sequence.finish_reason, sequence.text) == (expected.finish_reason, expected.text)
    for found, wanted in ((sequence.logprobs, expected.logprobs), (sequence.prompt_logprobs, expected.prompt_logprobs)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert a.token_id == b.token_id
            np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-4)
            np.testing.assert_allclose([*a.top.values()], [*b.top.values()], atol=1e-4)


@pytest.fixture(scope="module")
def engines(model_dir):
    """Engines without and with drafts."""
    enable_persistent_cache()
    model, tokenizer = load_model(model_dir), Tokenizer.of(model_dir)
    drafting = dataclasses.replace(SMALL_CONFIG, draft_tokens=3, token_budget=8)
    return {
        "plain": Engine(model, tokenizer, SMALL_CONFIG, num_pages=SMALL_PAGES),
        "drafting": Engine(model, tokenizer, drafting, num_pages=SMALL_PAGES),
    }


@pytest.fixture(scope="module")
def alone(engines):
    """Another engine without drafts, which need not compile its programs again."""
    plain = engines["plain"]
    engine = Engine(plain.model, plain.tokenizer, SMALL_CONFIG, num_pages=SMALL_PAGES)
    engine.runner.programs = plain.runner.programs
    return Alone(engine)


def run(engine, alone, *, examples, steps, derandomize):
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    before = engine.scheduler.preemptions
    run_state_machine_as_test(lambda: Machine(engine, alone), settings=options)
    assert engine.scheduler.preemptions > before


@pytest.mark.parametrize("name", ["plain", "drafting"])
def test_random_requests(engines, alone, name):
    run(engines[name], alone, examples=8, steps=25, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "drafting"])
def test_many_random_requests(engines, alone, name):
    run(engines[name], alone, examples=60, steps=50, derandomize=False)
