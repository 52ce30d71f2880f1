"""The demo's training script: the same mathematics as the Decoder, resuming, exporting a directory that LLM loads."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxinfer.models.files.loading import load_model

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train_demo_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def config(script):
    cfg = script.CONFIG
    positions = dataclasses.replace(cfg.layer(0).attention.positions, rotary_dim=8)
    small = cfg.with_attention(q_heads=4, kv_heads=2, head_dim=8, positions=positions).with_mlp(hidden=48)
    return dataclasses.replace(small, vocab=300, embed=32, layers=1)


def test_corpus_holds_out_and_deduplicates(script, library):
    corpus = script.read_corpus(library)
    assert sorted(corpus.training) == ["abc.py", "again.py"]
    assert sorted(corpus.held_out) == ["bisect.py", "queue.py"]


def test_loss_and_gradients_are_the_decoders(script, config):
    trainer = script.Trainer(config, peak=1e-3)
    params = trainer.start().params
    batch = np.random.default_rng(0).integers(0, config.vocab, (2, 25))

    def expected(params):
        model = trainer.model(params)
        positions = jnp.broadcast_to(jnp.arange(24), (2, 24))
        scores = model.logits(model(batch[:, :-1], positions)[0])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch[:, 1:]).mean()

    def actual(params):
        return script.cross_entropy(script.logits(trainer.model(params), batch[:, :-1], jnp.float32), batch[:, 1:])

    ours, theirs = (jax.jit(jax.value_and_grad(f))(params) for f in (actual, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, theirs)


def test_every_batch_of_an_epoch_is_new(script):
    stream = np.arange(1000)
    batches = [script.batch_at(stream, step, batch=3, length=20) for step in range(16)]
    starts = np.concatenate([batch[:, 0] for batch in batches])
    assert len(set(starts)) == 48
    assert {batch.shape for batch in batches} == {(3, 21)}
    assert set(script.batch_at(stream, 16, 3, 20)[:, 0]) - set(starts)  # the next epoch cuts elsewhere
    with pytest.raises(ValueError, match="fewer than batch=60"):
        script.batch_at(stream, 0, batch=60, length=20)


@pytest.mark.slow
def test_trains_resumes_exports(script, config, library, tmp_path, capsys):
    def options(work_dir: str, *more: str):
        common = ("--work-dir", str(tmp_path / work_dir), "--library", str(library), "--batch", "4", "--length", "64")
        return script.parse([*common, "--log-every", "4", "--learning-rate", "0.05", *more])

    trainer = script.Trainer(config, peak=0.05)
    stream = np.tile(np.arange(100, dtype=np.int32), 20)
    script.train(trainer, stream, options("stopped", "--max-steps", "4"))
    resumed = script.train(trainer, stream, options("stopped", "--max-steps", "8"))
    through = script.train(trainer, stream, options("through", "--max-steps", "8"))
    for name, param in through.params.items():
        np.testing.assert_array_equal(resumed.params[name], param, err_msg=name)
    printed = capsys.readouterr().out
    assert "Continuing at step 4 " in printed
    losses = [float(line.split("loss")[1].split()[0]) for line in printed.splitlines() if "loss" in line]
    assert losses[:2] == losses[2:]
    assert losses[1] < losses[0] < 5.8  # log(300) = 5.7 at the start

    model = script.run(options("through", "--max-steps", "0", "--export", str(tmp_path / "model")), config)
    assert "queue.py" in capsys.readouterr().out
    loaded = load_model(tmp_path / "model")
    again = nnx.merge(loaded.graphdef, loaded.state)
    tokens = jnp.arange(20)[None]
    np.testing.assert_allclose(again(tokens, tokens)[0], model(tokens, tokens)[0], rtol=1e-4, atol=1e-5)
    assert loaded.eos_ids == (0,)


def test_bits_count_every_token_once(script, config):
    """Windows overlap: each token of a text of several windows is counted in one of them, with enough context."""
    model = script.Trainer(config, peak=1e-3).model(script.Trainer(config, peak=1e-3).start().params)
    zeroed = nnx.merge(*nnx.split(model))
    zeroed.embed.table[...] = jnp.zeros_like(zeroed.embed.table[...])  # every token has probability 1 / vocab
    tokenizer = script.train_tokenizer(["x = 1\n"], config.vocab)
    for text in ("x", "x = 1\n" * 5, "x = 1\n" * 40):
        tokens = len(script.encode(tokenizer, [text])) - 1
        bits = script.model_bits(zeroed, tokenizer, text, window=16, stride=8)
        np.testing.assert_allclose(bits, tokens * np.log2(config.vocab), rtol=1e-5)
