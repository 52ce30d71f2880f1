"""Random requests that come, wait, give way and are given up: each ends once, with the text it has alone."""

import dataclasses
import errno
import functools
import itertools
import time

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

from jaxinfer.disk_cache import blocks
from jaxinfer.disk_cache.blocks import BlockFolder
from jaxinfer.generation.api.build import build_engine
from jaxinfer.generation.execution.plan import Plan
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import SamplingParams, StructuredOutputsParams
from jaxinfer.models.files.loading import load_model
from jaxinfer.text import Tokenizer
from tests.generation.conftest import SMALL_CONFIG as SIXTEEN
from tests.generation.conftest import SMALL_PAGES
from tests.tiny import HYBRID, save_tiny

MAX_STEPS = 2000
MAX_BYTES = 20_000
"""Of a disk tier: about a dozen pages."""


class Alone:
    """Runs every sequence by itself on an empty cache, once."""

    def __init__(self, engine):
        self.engine, self._known = engine, {}

    def expected(self, prompt, params):
        """The sequences of a request."""
        key = repr((prompt, params))
        if key not in self._known:
            self._known[key] = self.engine.prepare(prompt, params).sequences()
            for sequence in self._known[key]:
                self._run(sequence)
        return self._known[key]

    def _run(self, sequence):
        self.engine.scheduler.pages.clear()
        self.engine.add([sequence])
        while not sequence.finished:
            self.engine.step()
        self.engine.drain()


def reset(engine):
    """Make it idle, with an empty cache unless the host keeps pages."""
    for allocation in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(allocation.sequence.request_id)
    engine.drain()
    if engine.page_tier is None:  # else the pages give way to others, and come back
        engine.scheduler.pages.clear()


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
        {"temperature": 0.7, "logit_bias": dict.fromkeys(range(97, 103), 6.0), "stop_token_ids": (100,)},
        {"temperature": 0.7, "logit_bias": dict.fromkeys(range(97, 103), 6.0), "stop": ("ab", "c")},
        {"temperature": 0.0, "logit_bias": dict.fromkeys((97, 98), 30.0)},  # repeats itself: speculation is right
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[ab]{2,30}c")},
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
    def __init__(self, engines, alone):
        super().__init__()
        self.engines, self.alone = engines, alone
        self.engine = engines[True]
        self.requests = []
        self.ended = {}  # sequence -> its tokens when it was first seen to have ended

    @initialize(overlap=st.booleans())
    def begin(self, overlap):
        """With two requests that do not fit beside each other to their ends: one must give way."""
        self.engine = self.engines[overlap]
        reset(self.engine)
        for base in BASES:
            self.add((base[:30], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)))

    @rule(request=requests)
    def add(self, request):
        sequences = self.engine.prepare(*request).sequences()
        self.engine.add(sequences)
        self.requests.append((*request, sequences))

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            for sequence in self.engine.step():
                if sequence.finished:
                    self.ended.setdefault(sequence, (sequence.finish_reason, list(sequence.token_ids)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        *_, sequences = data.draw(st.sampled_from(self.requests[-4:]))
        running = [s for s in sequences if not s.finished]
        self.engine.abort(sequences[0].request_id)
        assert all(s.finish_reason is FinishReason.ABORT for s in running)
        self.ended.update({s: (s.finish_reason, list(s.token_ids)) for s in running})

    @invariant()
    def all_fits_together(self):
        self.engine.scheduler.check_integrity()

    def teardown(self):
        scheduler = self.engine.scheduler
        for _ in range(MAX_STEPS):
            if not (scheduler.running or scheduler.waiting):
                break
            self.step(1)
            self.all_fits_together()
        self.engine.drain()
        assert scheduler.pages.free == scheduler.pages.count
        assert scheduler.allocator.free_slots == self.engine.config.max_batch
        for prompt, params, sequences in self.requests:
            for sequence, expected in zip(sequences, self.alone.expected(prompt, params), strict=True):
                assert self.ended[sequence] == (sequence.finish_reason, sequence.token_ids)
                assert scheduler.allocation(sequence) is None
                check_same(sequence, expected)


def check_same(sequence, expected):
    count = len(sequence.token_ids)
    assert sequence.token_ids == expected.token_ids[:count]
    if sequence.finish_reason is FinishReason.ABORT:
        return
    assert (sequence.finish_reason, str(sequence.text)) == (expected.finish_reason, str(expected.text))
    for found, wanted in ((sequence.logprobs, expected.logprobs), (sequence.prompt_logprobs, expected.prompt_logprobs)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert a.token_id == b.token_id
            np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-4)
            np.testing.assert_allclose([*a.top.values()], [*b.top.values()], atol=1e-4)


SMALL_CONFIG = dataclasses.replace(SIXTEEN, token_budget=32, chunk_size=8)  # chunks of one page


@pytest.fixture(scope="module")
def engines(model_dir, tmp_path_factory, full_disk):
    """Engines without and with speculation, each by whether steps overlap; both of a pair share their programs."""
    pair = functools.partial(make_pair, load_model(model_dir), Tokenizer.from_folder(model_dir))
    speculative = dataclasses.replace(SMALL_CONFIG, max_batch=2, num_speculative_tokens=3, token_budget=8)
    hosted, from_both_ends = pair(SMALL_CONFIG, host_pages=12), pair(SMALL_CONFIG, host_pages=12)
    for engine in (*hosted.values(), *from_both_ends.values()):
        engine.page_tier._read = slow_and_failing(engine.page_tier._read)
    for engine in from_both_ends.values():
        split_at_random(engine.scheduler.allocator.restoring)
    disks = {name: BadDisk(tmp_path_factory.mktemp(name) / "kv", max_bytes=MAX_BYTES) for name in ("disk", "both")}
    return {
        "plain": pair(SMALL_CONFIG),
        "speculative": pair(speculative),
        "host": hosted,
        "both ends": from_both_ends,
        "disk": pair(SMALL_CONFIG, disk_kv=disks["disk"]),
        "both": pair(SMALL_CONFIG, host_pages=6, disk_kv=disks["both"]),
    }


def make_pair(model, tokenizer, config, host_pages=0, disk_kv=None):
    """Two engines, by whether steps overlap."""
    made = {
        overlap: build_engine(
            model,
            tokenizer,
            dataclasses.replace(config, overlap=overlap),
            Plan.of_model(model, config, num_pages=SMALL_PAGES, host_pages=host_pages, disk_kv=disk_kv is not None),
            disk_kv=disk_kv,
        )
        for overlap in (True, False)
    }
    made[False].executor.device.cache = made[True].executor.programs
    return made


class BadDisk(BlockFolder):
    """A folder of few blocks, of which one in `period` is damaged when it is read; it is slow every other time."""

    calls, period = itertools.count(), 5

    def get_into(self, key, *parts):
        number, file = next(self.calls), self._file(key)
        time.sleep(0.002 * (number % 2))
        if number % self.period == self.period - 1 and file.exists():
            file.write_bytes(file.read_bytes()[:-1])
        return super().get_into(key, *parts)


@pytest.fixture(scope="module")
def full_disk():
    """A disk that is full every seventh time, for a short while."""
    write, calls = blocks.write_atomically, itertools.count()

    def write_sometimes(*args, **options):
        if next(calls) % 7 == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "write_atomically", write_sometimes)
        patch.setattr(blocks, "PAUSE", 0.01)
        yield


def slow_and_failing(read):
    """Reads pages from the host, late every other time, and not at all every fifth."""
    calls = itertools.count()

    def read_sometimes(*arguments):
        number = next(calls)
        time.sleep(0.01 * (number % 2))
        if number % 5 == 4:
            raise OSError("injected")
        return read(*arguments)

    return read_sometimes


def split_at_random(restoring):
    """Have any number of the first pages be computed while the others come, which are late at any time."""
    rng = np.random.default_rng(0)

    def split(keys, tokens):
        return int(rng.integers(len(keys) + 1)), float(rng.choice([0.0, 0.001, 1.0]))

    restoring._split = split


@pytest.fixture(scope="module")
def alone(engines, model_dir):
    """Another engine without speculation, which need not compile its programs again."""
    model = load_model(model_dir)
    plan = Plan.of_model(model, SMALL_CONFIG, num_pages=SMALL_PAGES)
    engine = build_engine(model, Tokenizer.from_folder(model_dir), SMALL_CONFIG, plan)
    engine.executor.device.cache = engines["plain"][True].executor.programs
    return Alone(engine)


def run(engines, alone, *, examples, steps, derandomize):
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    def preemptions():
        return [engine.scheduler.preemptions for engine in engines.values()]

    before = preemptions()
    run_state_machine_as_test(lambda: Machine(engines, alone), settings=options)
    assert all(after > earlier for after, earlier in zip(preemptions(), before, strict=True))
    for engine in engines.values():
        if (tier := engine.page_tier) is not None:
            tier.settle()
            tier.check_integrity()
            kept = engine.stats().host_kv, engine.stats().disk_kv
            assert all(stats is None or stats.read_back > 0 for stats in kept)
            if engine.scheduler.allocator.restoring._split.__name__ == "split":
                assert kept[0].from_back > 0


NAMES = ["plain", "speculative", "host", "both ends", "disk", "both"]


@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_random_requests(engines, alone, name):
    run(engines[name], alone, examples=3 if name == "plain" else 6, steps=25, derandomize=True)


@pytest.fixture(scope="module")
def with_states(tmp_path_factory, full_disk):
    """Engines on a model with recurrent states, without and with speculation and tiers; and another without a cache."""
    folder = save_tiny(tmp_path_factory.mktemp("hybrid") / "model", config=HYBRID)
    pair = functools.partial(make_pair, load_model(folder), Tokenizer.from_folder(folder))
    plain = pair(dataclasses.replace(SMALL_CONFIG, prefix_caching=False))[True]
    speculative = dataclasses.replace(SMALL_CONFIG, max_batch=2, num_speculative_tokens=3)
    hosted = pair(speculative, host_pages=60)
    for engine in hosted.values():
        engine.page_tier._read = slow_and_failing(engine.page_tier._read)
    disks = [BadDisk(tmp_path_factory.mktemp("states") / "kv", max_bytes=10 * MAX_BYTES) for _ in range(2)]
    for disk in disks:
        disk.period = 17  # the pages of a load with a state, six or more, are of no use unless all are whole
    return {
        "plain": pair(SMALL_CONFIG),
        "speculative": pair(speculative),
        "host": hosted,
        "disk": pair(SMALL_CONFIG, disk_kv=disks[0]),
        "both": pair(SMALL_CONFIG, host_pages=60, disk_kv=disks[1]),
    }, Alone(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "speculative", "host", "disk", "both"])
@pytest.mark.parametrize(("examples", "derandomize"), [(20, True), (60, False)])
def test_random_requests_of_a_model_with_states(with_states, name, examples, derandomize):
    engines, alone = with_states
    run(engines[name], alone, examples=examples, steps=25, derandomize=derandomize)
    assert sum(engine.stats().cached_tokens for engine in engines[name].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_random_requests(engines, alone, name):
    run(engines[name], alone, examples=60, steps=50, derandomize=False)
