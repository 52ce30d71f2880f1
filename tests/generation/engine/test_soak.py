"""A long mixed load; JAXINFER_SOAK_SECONDS says how long, twenty minutes unless given."""

import os
import time
from collections import Counter, deque
from random import Random

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jaxinfer.generation.api.build import build_engine
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.view import RequestView
from jaxinfer.generation.execution.plan import Plan
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import SamplingParams, StructuredOutputsParams
from jaxinfer.models.files.loading import load_model
from jaxinfer.text import Tokenizer
from tests.peft import random_pair, save_adapter

CONFIG = EngineConfig(
    max_batch=4,
    context=64,
    page_size=8,
    token_budget=32,
    chunk_size=8,
    max_decode_passes=4,
    num_speculative_tokens=3,
    max_adapters=2,
    max_lora_rank=4,
)
PAGES = 16
MAX_LIVE = 24
CHECK_EVERY = 20
LETTERS = dict.fromkeys((97, 98, 99), 8.0)
GRAMMARS = (
    StructuredOutputsParams(regex="[ab]{2,20}c"),
    StructuredOutputsParams(choice=("yes", "no", "perhaps")),
    StructuredOutputsParams(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 4}),
)
BAD = (
    ([], {}),
    ([1] * 64, {}),
    ([300], {}),
    ([1], {"adapter": "unknown"}),
    ([1], {"logits_processors": ("unknown",)}),
    ([1], {"structured_outputs": StructuredOutputsParams(regex="(")}),
    ([1], {"stop_token_ids": (999,)}),
)


def without_d(scores, history, length):
    """A logits processor."""
    return scores.at[:, 100].set(-jnp.inf)


@pytest.fixture
def engine(model_dir, tmp_path):
    model = load_model(model_dir)
    engine = build_engine(
        model,
        Tokenizer.from_folder(model_dir),
        CONFIG,
        Plan.of_model(model, CONFIG, num_pages=PAGES),
        logits_processors={"no d": without_d},
    )
    rng = np.random.default_rng(0)
    for name in ("one", "two", "three", "broken"):
        pair = random_pair(32, 32, 2, rng)
        folder = save_adapter(tmp_path / name, {"model.layers.0.self_attn.q_proj": pair})
        engine.adapters.register(name, folder)
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    return engine


class Load:
    """Requests at random, and what has come of them."""

    def __init__(self, engine):
        self.engine, self.random = engine, Random(0)
        self.bases = [self.random.choices(range(97, 105), k=40) for _ in range(3)]
        self.live = {}  # request id -> its sequences
        self.texts = {}  # sequence that is streamed -> its text so far
        self.recent = deque(maxlen=200)  # sequences that ended lately, with their tokens
        self.added = 0
        self.ended = Counter()

    def add(self):
        random = self.random
        prompt = random.choice(self.bases)[: random.randint(0, 40)] + random.choices(
            range(97, 100), k=random.randint(1, 9)
        )
        sequences = self.engine.prepare(prompt, self.params()).sequences()
        self.engine.add(sequences)
        self.added += len(sequences)
        self.live[sequences[0].request_id] = sequences
        if random.random() < 0.3:
            self.texts |= dict.fromkeys(sequences, "")

    def params(self):
        random, choice = self.random, self.random.choice
        grammar = choice(GRAMMARS) if random.random() < 0.15 else None
        return SamplingParams(
            max_tokens=choice([1, 5, 15, 55, None]),
            min_tokens=choice([0, 0, 1]) if grammar is None else 0,
            temperature=choice([0.0, 0.7, 1.0]),
            top_k=choice([0, 0, 30]),
            top_p=choice([1.0, 0.9]),
            min_p=choice([0.0, 0.01]),
            repetition_penalty=choice([1.0, 1.2]),
            presence_penalty=choice([0.0, 0.2]),
            frequency_penalty=choice([0.0, 0.2]),
            logit_bias=choice([{}, LETTERS]),
            seed=choice([None, random.randrange(2**32)]),
            n=choice([1, 1, 1, 2, 5]),
            stop=choice([(), (), ("ab", "ccc")]),
            stop_token_ids=choice([(), (101,)]),
            ignore_eos=random.random() < 0.5,
            logprobs=choice([None, None, 3]),
            prompt_logprobs=choice([None, None, None, 1]),
            structured_outputs=grammar,
            logits_processors=choice([(), (), ("no d",)]),
            adapter=choice([None, None, None, "one", "two", "three", "broken"]),
            priority=random.randint(-2, 2),
        )

    def add_bad(self):
        prompt, params = self.random.choice(BAD)
        with pytest.raises(ValueError, match=r"."):
            self.engine.prepare(prompt, SamplingParams(**params))

    def abort(self):
        sequences = self.random.choice(list(self.live.values()))
        going = [s for s in sequences if not s.finished]
        self.engine.abort(sequences[0].request_id)
        self.take(going)

    def step(self):
        self.take(self.engine.step())

    def take(self, advanced):
        for sequence in dict.fromkeys(advanced):
            siblings = self.live.get(sequence.request_id)
            if siblings is None or sequence not in siblings:
                continue  # it was in flight when it ended
            if sequence in self.texts:
                text = RequestView([sequence]).output().outputs[0].text
                assert text.startswith(self.texts[sequence])
                self.texts[sequence] = text
            if sequence.finished:
                self.end(sequence, siblings)

    def end(self, sequence, siblings):
        if sequence.finish_reason is not FinishReason.ABORT:
            broken = sequence.params.adapter == "broken"
            assert (sequence.finish_reason is FinishReason.ERROR) == broken, sequence.error
        self.ended[sequence.finish_reason] += 1
        self.recent.append((sequence, list(sequence.token_ids)))
        self.texts.pop(sequence, None)
        siblings.remove(sequence)
        if not siblings:
            del self.live[sequence.request_id]

    def check(self):
        self.engine.scheduler.check_integrity()
        assert all(sequence.finished and sequence.token_ids == ids for sequence, ids in self.recent)

    def run(self, seconds):
        """Returns (seconds since the start, resident bytes) now and then."""
        process, start, memory = psutil.Process(), time.monotonic(), []
        for number in range(1 << 62):
            passed = time.monotonic() - start
            if passed > seconds:
                return memory
            if len(self.live) < MAX_LIVE and self.random.random() < 0.5:
                self.add()
            if self.live and self.random.random() < 0.03:
                self.abort()
            if self.random.random() < 0.03:
                self.add_bad()
            self.step()
            if number % CHECK_EVERY == 0:
                self.check()
                memory.append((passed, process.memory_info().rss))

    def finish(self):
        while self.live:
            self.step()
            self.check()
        self.take(self.engine.drain())


@pytest.mark.slow
@pytest.mark.soak
def test_a_mixed_load_leaves_nothing_behind(engine):
    seconds = float(os.environ.get("JAXINFER_SOAK_SECONDS", "1200"))
    engine.compile_ahead()
    load = Load(engine)
    memory = load.run(seconds)
    load.finish()
    early, late = (
        np.mean([used for at, used in memory if first * seconds <= at <= last * seconds])
        for first, last in ((0.15, 0.2), (0.95, 1.0))
    )
    preemptions, misses = engine.scheduler.preemptions, engine.executor.programs.misses
    print(f"{load.added} sequences, {dict(load.ended)}, {preemptions} preemptions, memory {late / early:.3f}")
    assert load.ended.total() == load.added
    assert min(load.ended[reason] for reason in FinishReason) > 0
    assert engine.scheduler.pages.free == engine.scheduler.pages.count
    assert not engine.scheduler.running
    assert misses == 0
    assert late <= 1.05 * early
