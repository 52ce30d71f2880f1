"""Vectors through the engine: of encoders as `transformers` finds them, of decoders as a pass without a cache does."""

import dataclasses
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.generation import LLM, Embedder, PoolingParams, SamplingParams
from jaxinfer.generation.engine.buckets import EncoderBuckets
from jaxinfer.generation.engine.config import EncoderEngineConfig
from jaxinfer.generation.engine.encoder_scheduler import EncoderScheduler
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.params import MAX_PRIORITY
from jaxinfer.models.files.conversion import convert
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs
from tests.goldens.expected import read_expected

GOLDEN = pathlib.Path(__file__).parents[2] / "goldens" / "roberta_plain"
LONG = list(b"a text of several pieces, each of sixteen tokens, and several pages")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def unit(x):
    return x / np.linalg.norm(x)


def vector_of(engine, prompt, **params):
    """The sequence of a request for a prompt's vector, not yet queued."""
    return engine.prepare(prompt, PoolingParams(**params)).sequences()[0]


def run_all(engine, sequences):
    """Step until these have ended."""
    while not all(s.finished for s in sequences):
        engine.step()
    engine.drain()
    engine.scheduler.check_integrity()


# Encoders


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A context of 24 tokens; rows of 16 and 24."""
    path = tmp_path_factory.mktemp("models") / "encoder"
    convert(GOLDEN, path)
    return Embedder(path, max_batch=4)


@pytest.fixture(scope="module")
def golden():
    """Prompts, and the vectors that follow from the hidden vectors of `transformers`."""
    expected = read_expected(GOLDEN)
    prompts = [row[:length].tolist() for row, length in zip(expected["tokens"], expected["lengths"], strict=True)]
    hidden = np.split(expected["hidden"], np.cumsum(expected["lengths"])[:-1])
    return prompts, np.array([unit(rows.mean(axis=0)) for rows in hidden])


def test_an_encoder_gives_the_vectors_of_transformers_in_the_order_asked(encoder, golden):
    prompts, expected = golden
    order = [0, 1, 2, 2, 1, 0, 1, 1, 2]  # lengths alternate, and more than a batch of each
    np.testing.assert_allclose(encoder.embed([prompts[i] for i in order]), expected[order], atol=1e-5)
    assert encoder.embed([]).shape == (0, 24)


def test_one_text_is_one_vector(encoder, golden, llm, model_dir):
    prompts, expected = golden
    np.testing.assert_allclose(encoder.embed(prompts[0]), expected[:1], atol=1e-5)
    with few_programs():
        embedder = Embedder(model_dir, **PLAIN)
    assert embedder.embed("hello").shape == (1, 32)
    np.testing.assert_array_equal(embedder.embed("hello"), llm.embed(["hello"]))


def test_merging_takes_padding_first(encoder, golden):
    """A text much shorter than its row loses none of its tokens, so that its vector stays; a long one's changes."""
    prompts, _ = golden
    merging = Embedder(encoder.model.folder, max_batch=4, level=-2)
    short, full = [prompts[0][0], *range(5, 9)], [prompts[0][0], *range(5, 20)]
    plain, merged = encoder.embed([short, full]), merging.embed([short, full])
    np.testing.assert_allclose(merged[0], plain[0], atol=1e-6)
    assert 0.5 < merged[1] @ plain[1] < 0.99999
    np.testing.assert_allclose(merging.embed([full]), merged[1:], atol=1e-6)  # whatever is beside it
    np.testing.assert_allclose(np.linalg.norm(merged, axis=1), 1, atol=1e-6)


def test_levels_that_there_are_not(encoder, model_dir):
    with pytest.raises(ValueError, match=r"EncoderEngineConfig.level must be 0 or less: prompts .*, got 2"):
        Embedder(encoder.model.folder, level=2)
    with pytest.raises(ValueError, match=r"^EngineConfig.level=-2 is for encoders, and this model is a decoder"):
        LLM(model_dir, level=-2)
    with pytest.raises(ValueError, match="level=-2 needs all weights on the devices"):
        Embedder(encoder.model.folder, level=-2, weights="host")


def test_an_encoder_compiles_ahead_what_a_call_needs(encoder, golden):
    prompts, _ = golden
    encoder.engine.executor.compile_ahead(
        [encoder.engine.prepare(p, PoolingParams()).sequences()[0] for p in prompts * 3]
    )
    with encoder.engine.executor.programs.forbid_compile():
        encoder.embed(prompts * 3)
    assert encoder.engine.compile_ahead() > 0
    with encoder.engine.executor.programs.forbid_compile():
        encoder.embed(prompts[:1] * 2)


def test_requests_to_an_encoder_come_and_go(encoder, golden):
    """One is given up while it waits and one while it runs."""
    prompts, expected = golden
    engine = encoder.engine
    sequences = [vector_of(engine, prompts[0]) for _ in range(6)]
    engine.add(sequences)
    engine.step()  # the first four are on their way
    engine.abort(sequences[1].request_id)
    engine.abort(sequences[5].request_id)
    run_all(engine, sequences)
    assert [s.finish_reason for s in sequences] == ["stop", "abort", "stop", "stop", "stop", "abort"]
    for sequence in (s for s in sequences if s.finish_reason == "stop"):
        np.testing.assert_allclose(sequence.embedding, expected[0], atol=1e-5)
    assert sequences[1].embedding is None


def test_a_step_of_an_encoder_that_fails_ends_its_requests_alone(encoder, golden, monkeypatch):
    prompts, expected = golden
    engine = encoder.engine
    failing, sound = vector_of(engine, prompts[0]), vector_of(engine, prompts[2])
    engine.add([failing, sound])
    collect = engine.executor.collect

    def lose_the_device(flight):
        monkeypatch.setattr(engine.executor, "collect", collect)
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.executor, "collect", lose_the_device)
    run_all(engine, [failing, sound])
    assert failing.error == "RuntimeError: device lost"
    np.testing.assert_allclose(sound.embedding, expected[2], atol=1e-5)
    monkeypatch.setattr(engine.executor, "collect", lose_the_device)
    with pytest.raises(RuntimeError, match="Text 0: RuntimeError: device lost"):
        encoder.embed(prompts[:1])


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_that_does_not_fit_runs_in_halves(encoder, golden, monkeypatch, late):
    prompts, expected = golden
    passes, sizes = encoder.engine.executor.passes, []
    run = passes.run

    class NoVectors:
        def is_ready(self):
            return False

        def copy_to_host_async(self):
            if not late:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")

        def __array__(self, *_, **__):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")

    def limited(command):
        sizes.append(command.sizes.batch)
        vectors = run(command)
        return dataclasses.replace(vectors, vectors=NoVectors()) if command.sizes.batch > 2 else vectors

    monkeypatch.setattr(passes, "run", limited)
    np.testing.assert_allclose(encoder.embed([prompts[1]] * 4), expected[[1] * 4], atol=1e-5)
    assert sizes == [4, 2, 2]
    monkeypatch.setattr(passes, "run", lambda command: dataclasses.replace(run(command), vectors=NoVectors()))
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        encoder.embed([prompts[1]] * 4)


def test_batches_of_an_encoder():
    """In order, by priority, of one padded length, within the token budget."""
    config = EncoderEngineConfig(max_batch=4, context=64, token_budget=128)
    scheduler, ids = EncoderScheduler(config, EncoderBuckets.from_config(config)), map(str, itertools.count())

    def add(length, priority=0):
        params = PoolingParams(priority=priority)
        prompt = (1,) * length
        request = Request(request_id=next(ids), prompt=None, prompt_token_ids=prompt, params=params, max_length=length)
        (sequence,) = request.sequences()
        scheduler.add(sequence)
        return sequence

    short, long = [add(n) for n in (3, 16)], [add(n) for n in (17, 64, 33)]
    short += [add(n) for n in (1, 2, 5)]
    last, first = add(4, priority=MAX_PRIORITY), add(20, priority=-1)
    batches = []
    while batch := scheduler.schedule():
        batches.append(batch.sequences)
        scheduler.check_integrity()
    assert batches == [[first, long[0]], short[:4], long[1:], [short[4], last]]


def test_what_an_encoder_refuses(encoder):
    for prompt, message in (
        ([], "Text 1: The prompt is empty"),
        ([1] * 25, "Text 1: The prompt has 25 tokens; the context of 24 is shorter"),
        ([1, 64], r"Text 1: Token ids \[64\] of the prompt are outside the vocabulary \[0, 64\)"),
        ("text", "Text 1: The model directory has no tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            encoder.embed([[1], prompt])
    assert encoder.embed([[1] * 24]).shape == (1, 24)
    with pytest.raises(ValueError, match="adapter is 'a', but the engine has no room for adapters"):
        encoder.embed([[1]], adapter="a")
    with pytest.raises(ValueError, match="can only embed: it is an encoder"):
        encoder.engine.prepare([1], GREEDY)
    path = encoder.model.folder
    with pytest.raises(ValueError, match=r"is an encoder; use jaxinfer\.Embedder"):
        LLM(path)
    with pytest.raises(
        ValueError, match=r"^EncoderEngineConfig.max_adapters=2 is for decoders, and this model is an encoder"
    ):
        Embedder(path, max_adapters=2)
    with pytest.raises(ValueError, match=r"Embedder.context must be in \[2, 24\] for this model, got 25"):
        Embedder(path, context=25)
    with pytest.raises(ValueError, match=r"Embedder.max_batch must be an integer >= 1, below 2\*\*30, got 0"):
        Embedder(path, max_batch=0)


# Decoders


@pytest.fixture(scope="module")
def decoder(model_dir):
    """An engine whose prompts go in pieces of 16 tokens."""
    with few_programs():
        return Embedder(model_dir, max_batch=2, token_budget=16, chunk_size=16)


@pytest.fixture(scope="module")
def mean_of(decoder):
    """The vector of a prompt by one pass without a cache."""

    @jax.jit
    def hidden_vectors(state, ids):
        module = nnx.merge(decoder.model.graphdef, state)
        return module(ids[None], jnp.arange(len(ids))[None])[0][0]

    def mean(prompt):
        padded = np.pad(prompt, (0, 128 - len(prompt)))
        return unit(np.asarray(hidden_vectors(decoder.model.state, padded))[: len(prompt)].mean(axis=0))

    return mean


@pytest.mark.slow
def test_a_decoder_gives_the_mean_of_its_hidden_vectors(decoder, mean_of):
    prompts = [[7], LONG, list(range(16)), list(range(128)), LONG[:40]]  # one fills the context
    found = decoder.embed(prompts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [mean_of(p) for p in prompts], atol=1e-5)
    text = "import os"
    np.testing.assert_allclose(decoder.embed([text])[0], mean_of(decoder.tokenizer.encode(text)), atol=1e-5)


def test_a_cached_beginning_changes_no_vector(decoder, mean_of):
    engine = decoder.engine
    (generated,) = engine.prepare(LONG, GREEDY).sequences()
    engine.add([generated])
    run_all(engine, [generated])
    for prompt in (LONG, [*LONG, 1, 2], LONG[:32]):
        np.testing.assert_allclose(decoder.embed([prompt])[0], mean_of(prompt), atol=1e-5)
    (again,) = engine.prepare(LONG, GREEDY).sequences()
    engine.add([again])
    run_all(engine, [again])
    assert again.num_cached_tokens == len(LONG) - 1
    assert again.token_ids == generated.token_ids


def test_embedding_beside_generation(decoder, mean_of):
    engine = decoder.engine
    prompts = [LONG[5:], LONG[:20], [9, 8, 7]]
    alone = []
    for prompt in prompts:
        (sequence,) = engine.prepare(prompt, GREEDY).sequences()
        engine.add([sequence])
        run_all(engine, [sequence])
        alone.append(sequence.token_ids)
    engine.scheduler.pages.clear()
    generating = [engine.prepare(prompt, GREEDY).sequences()[0] for prompt in prompts]
    embedding = [vector_of(engine, p) for p in (LONG[::-1], [3], LONG[3:])]
    for pair in zip(generating, embedding, strict=True):
        engine.add(list(pair))
        engine.step(1)
    run_all(engine, [*generating, *embedding])
    assert [s.token_ids for s in generating] == alone
    for sequence in embedding:
        assert len(sequence.token_ids) == sequence.num_prompt_tokens
        np.testing.assert_allclose(sequence.embedding, mean_of(sequence.token_ids), atol=1e-5)


def test_embeddings_of_a_decoder_are_aborted_and_prioritised(decoder, mean_of):
    engine = decoder.engine
    late, early = vector_of(engine, LONG, priority=2), vector_of(engine, LONG[::-1])
    running = vector_of(engine, list(range(100)))
    engine.add([running, late, early])
    engine.step()
    engine.abort(running.request_id)
    engine.scheduler.check_integrity()
    ended = []
    while not (late.finished and early.finished):
        ended += [s for s in engine.step() if s.finished]
    assert ended.index(early) < ended.index(late)
    assert running.finish_reason == "abort"
    np.testing.assert_allclose(late.embedding, mean_of(LONG), atol=1e-5)


def test_one_model_generates_and_embeds(llm, mean_of):
    before = llm.generate(LONG, GREEDY)[0].outputs[0].token_ids
    found = llm.embed([LONG, [7]])
    np.testing.assert_allclose(found, [mean_of(LONG), mean_of([7])], atol=1e-5)
    assert llm.embed("x").shape == (1, 32)
    assert llm.generate(LONG, GREEDY)[0].outputs[0].token_ids == before
    with pytest.raises(ValueError, match="Text 0: The prompt has 129 tokens; the context of 128 is shorter"):
        llm.embed([[1] * 129])
