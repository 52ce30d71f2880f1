"""What goes wrong ends the requests it is about, and no others."""

import dataclasses
import itertools
import shutil

import jax
import numpy as np
import pytest

from jaxinfer.generation.api.build import build_engine
from jaxinfer.generation.execution.plan import Plan
from jaxinfer.generation.execution.programs.decode import Decode
from jaxinfer.generation.execution.programs.prefill import Prefill
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import SamplingParams, StructuredOutputsParams
from jaxinfer.models.files.loading import load_model
from jaxinfer.text import Tokenizer
from tests.generation.conftest import SMALL_CONFIG, SMALL_PAGES
from tests.generation.few_programs import few_programs
from tests.peft import random_pair, save_adapter

PROMPTS = [np.random.default_rng(n).integers(97, 105, n).tolist() for n in (20, 3, 33, 9, 17, 12, 5)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=25, ignore_eos=True)


@pytest.fixture(scope="module")
def model(model_dir):
    return load_model(model_dir)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer.from_folder(model_dir)


@pytest.fixture(scope="module")
def engines(model, tokenizer):
    """Engines by whether steps overlap, which share their programs."""
    made = {}
    for overlap in (True, False):
        config = dataclasses.replace(SMALL_CONFIG, overlap=overlap)
        made[overlap] = build_engine(model, tokenizer, config, Plan.of_model(model, config, num_pages=SMALL_PAGES))
    made[False].executor.device.cache = made[True].executor.programs
    return made


@pytest.fixture(scope="module")
def engine(engines):
    return engines[True]


def run(engine, requests):
    """Step until these requests have ended."""
    for _ in range(1000):
        if all(s.finished for sequences in requests for s in sequences):
            break
        engine.step()
        engine.scheduler.check_integrity()
    engine.drain()
    assert all(s.finished for sequences in requests for s in sequences)
    assert engine.scheduler.pages.free == engine.scheduler.pages.count


def add(engine, prompt, params=PARAMS):
    sequences = engine.prepare(prompt, params).sequences()
    engine.add(sequences)
    return sequences


@pytest.fixture(scope="module")
def alone(engine):
    """The tokens of each prompt, when it has the engine to itself."""
    texts = []
    for prompt in PROMPTS:
        engine.scheduler.pages.clear()
        (sequence,) = add(engine, prompt)
        run(engine, [[sequence]])
        texts.append(sequence.token_ids)
    return texts


class Poisoned:
    """A result that cannot be fetched."""

    def copy_to_host_async(self):
        pass

    def is_ready(self):
        return True

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("injected")


def before_it_runs(program, args):
    raise RuntimeError("injected")


def after_the_state_is_consumed(program, args):
    for array in jax.tree.leaves(args[2]):
        array.delete()
    raise RuntimeError("injected")


def when_results_are_fetched(program, args):
    state, result = program(*args)
    return state, result._replace(tokens=Poisoned())


class Faulty:
    """Makes the executor's next step fail; `failed` is its batch."""

    def __init__(self, fault, executor, monkeypatch):
        self.fault, self.failed = fault, None
        self._launch, self._get = executor.launch, executor.programs.get
        monkeypatch.setattr(executor, "launch", self.launch)
        monkeypatch.setattr(executor.programs, "get", self.get)

    def launch(self, batch):
        self.batch = batch
        return self._launch(batch)

    def get(self, sizes):
        self.program = self._get(sizes)
        if self.failed is not None or not isinstance(sizes, Prefill | Decode):
            return self.program
        self.sizes, self.name, self.bucket = sizes, self.program.name, self.program.bucket
        return self

    def __call__(self, *args):
        self.failed = self.batch
        return self.fault(self.program, args)


@pytest.mark.parametrize("steps", [1, 4, 9])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", [before_it_runs, after_the_state_is_consumed, when_results_are_fetched])
def test_a_failing_step_ends_its_own_requests(engines, alone, monkeypatch, fault, overlap, steps):
    engine = engines[overlap]
    assert engine.executor.depth == int(overlap)
    engine.scheduler.pages.clear()
    requests = [add(engine, prompt) for prompt in PROMPTS]
    for _ in range(steps):
        engine.step()
    faulty = Faulty(fault, engine.executor, monkeypatch)
    run(engine, requests)
    failed = [s for (s,) in requests if s.finish_reason is FinishReason.ERROR]
    assert failed
    assert set(failed) <= set(faulty.failed.sequences)
    assert {s.error for s in failed} == {"RuntimeError: injected"}
    for (sequence,), ids in zip(requests, alone, strict=True):
        assert sequence.token_ids == (ids if sequence not in failed else ids[: len(sequence.token_ids)])
    assert len(failed) < len(requests)


def test_a_failure_while_others_wait_after_a_preemption(engine, alone, monkeypatch):
    engine.scheduler.pages.clear()
    before = engine.scheduler.preemptions
    requests = [add(engine, prompt) for prompt in PROMPTS]
    while engine.scheduler.preemptions == before:
        engine.step()
    waiting = [allocation.sequence for allocation in engine.scheduler.waiting]
    preempted = [sequence for sequence in waiting if sequence.num_output_tokens]
    assert preempted
    faulty = Faulty(after_the_state_is_consumed, engine.executor, monkeypatch)
    run(engine, requests)
    assert any(s.finish_reason is FinishReason.ERROR for s in faulty.failed.sequences)
    for sequence in preempted:
        assert sequence.token_ids == alone[requests.index([sequence])]


def wrong_results(sequence, monkeypatch):
    """Make the third token of a sequence one that its text cannot take."""
    push, count = sequence.detokenizer.push, itertools.count(1)

    def failing(token):
        if next(count) == 3:
            raise LookupError("injected")
        return push(token)

    monkeypatch.setattr(sequence.detokenizer, "push", failing)


def test_results_that_cannot_be_applied_end_their_own_sequence(engine, alone, monkeypatch, caplog):
    engine.scheduler.pages.clear()
    requests = [add(engine, prompt) for prompt in PROMPTS]
    victim = requests[2][0]
    wrong_results(victim, monkeypatch)
    run(engine, requests)
    assert (victim.finish_reason, victim.error) == (FinishReason.ERROR, "LookupError: injected")
    assert victim.num_output_tokens == 3
    assert [s.token_ids for (s,) in requests if s is not victim] == [ids for ids in alone if ids is not alone[2]]
    assert "could not be applied" in caplog.text


def test_a_grammar_that_cannot_go_on_ends_its_own_request(engine, alone):
    engine.scheduler.pages.clear()
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="a{20}"), max_tokens=25)
    structured = add(engine, PROMPTS[0], params)
    other = add(engine, PROMPTS[1])
    while len(structured[0].token_ids) < len(PROMPTS[0]) + 3:
        engine.step()
    matcher = structured[0].matcher
    matcher._vocabulary = dataclasses.replace(matcher._vocabulary, text=np.zeros_like(matcher._vocabulary.text))
    run(engine, [structured, other])
    assert structured[0].finish_reason is FinishReason.ERROR
    assert "No token of the model may follow" in structured[0].error
    assert other[0].token_ids == alone[1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_scores_that_leave_nothing_are_an_error(engine, tokenizer, alone, temperature):
    engine.scheduler.pages.clear()
    banned = {tokenizer.encode("x")[0]: -np.inf}
    choice = StructuredOutputsParams(choice=("yx",))
    nothing = add(
        engine, PROMPTS[0], SamplingParams(temperature=temperature, structured_outputs=choice, logit_bias=banned)
    )
    other = add(engine, PROMPTS[1])
    run(engine, [nothing, other])
    assert (str(nothing[0].text), nothing[0].finish_reason) == ("y", FinishReason.ERROR)
    assert "No token can be chosen" in nothing[0].error
    assert other[0].token_ids == alone[1]


def test_a_request_belongs_to_the_engine_that_has_prepared_it(engine, model, tokenizer):
    other = build_engine(model, tokenizer, SMALL_CONFIG, Plan.of_model(model, SMALL_CONFIG, num_pages=2))
    request = other.prepare([1, 2], SamplingParams(max_tokens=2))
    assert other.prepare(request) is request
    with pytest.raises(ValueError, match="Another model has prepared this request"):
        engine.prepare(request)
    with pytest.raises(ValueError, match="A prepared request already has its params"):
        other.prepare(request, SamplingParams())


@pytest.mark.parametrize("damage", ["corrupt", "gone"])
def test_an_adapter_that_cannot_be_read_ends_its_own_request(model, tmp_path, damage, alone):
    config = dataclasses.replace(SMALL_CONFIG, max_adapters=1)
    with few_programs():
        engine = build_engine(model, None, config, Plan.of_model(model, config, num_pages=SMALL_PAGES))
    pair = random_pair(32, 32, 2, np.random.default_rng(0))
    folder = save_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": pair})
    engine.adapters.register("damaged", folder)
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    damaged = add(engine, PROMPTS[1], dataclasses.replace(PARAMS, adapter="damaged"))
    other = add(engine, PROMPTS[1])
    run(engine, [damaged, other])
    assert damaged[0].finish_reason is FinishReason.ERROR
    assert str(folder) in damaged[0].error
    assert other[0].token_ids == alone[1]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "The prompt is empty"),
        ([1] * 64, {}, "The prompt has 64 tokens; the context of 64 leaves no room"),
        ([1], {"adapter": "any"}, "SamplingParams.adapter is 'any', but the engine has no room for adapters"),
        (
            [1],
            {"logits_processors": ("any",)},
            r"logits_processors holds \['any'\], unknown to this engine",
        ),
        (
            [1],
            {"structured_outputs": StructuredOutputsParams(json={"type": "nonsense"})},
            "StructuredOutputsParams.json does not compile",
        ),
        (
            [1],
            {"structured_outputs": StructuredOutputsParams(regex="(")},
            "regex does not compile",
        ),
        ([1], {"stop_token_ids": (257,)}, r"SamplingParams.stop_token_ids holds \[257\]"),
        ([257], {}, r"Token ids \[257\] of the prompt are outside the vocabulary"),
    ],
)
def test_bad_requests_are_refused_at_once(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.prepare(prompt, SamplingParams(**params))
    assert not engine.scheduler.waiting


def test_what_an_engine_lacks_is_said(model):
    small = build_engine(model, None, SMALL_CONFIG, Plan.of_model(model, SMALL_CONFIG, num_pages=2))
    with pytest.raises(ValueError, match="30 tokens with max_tokens need 4 pages of 8 tokens; the cache has 2"):
        small.prepare([1] * 20, SamplingParams(max_tokens=10))
    with pytest.raises(ValueError, match=r"SamplingParams.structured_outputs needs a tokenizer"):
        small.prepare([1], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    with pytest.raises(ValueError, match=r"SamplingParams.stop needs a tokenizer"):
        small.prepare([1], SamplingParams(stop="a"))
    config = dataclasses.replace(SMALL_CONFIG, max_adapters=1)
    adapting = build_engine(model, None, config, Plan.of_model(model, config, num_pages=2))
    with pytest.raises(ValueError, match="unknown adapter 'any'; known: none"):
        adapting.prepare([1], SamplingParams(adapter="any"))


def test_a_grammar_decides_itself_when_it_ends():
    with pytest.raises(ValueError, match=r"SamplingParams.structured_outputs must be None when min_tokens is given"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), min_tokens=1)
