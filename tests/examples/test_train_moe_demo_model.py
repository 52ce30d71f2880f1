"""The training script of the demo with experts: its mathematics are the Decoder's, and it exports what LLM loads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import train_demo_model
from examples import train_moe_demo_model as script
from jaxinfer.checkpoints import read_manifest
from jaxinfer.models.files.loading import load_model

_POSITIONS = dataclasses.replace(script.CONFIG.layer(0).attention.positions, rotary_dim=8)
_NARROW = script.CONFIG.with_attention(q_heads=4, kv_heads=2, head_dim=8, positions=_POSITIONS).with_mlp(hidden=16)
CONFIG = dataclasses.replace(_NARROW, vocab=300, embed=32, layers=1)
EVERY_CHOICE = 4.0
"""The capacity factor at which an expert has room for all tokens: 8 experts, of which each takes 2."""


@pytest.fixture(scope="module")
def trained():
    """A trainer and weights whose routers are sure of their choices."""
    trainer = script.MoeTrainer(CONFIG, peak=1e-3)
    params = trainer.start().params
    return trainer, {name: 20 * x if name.endswith("router.weight") else x for name, x in params.items()}


@pytest.fixture(scope="module")
def batch():
    return np.random.default_rng(0).integers(0, CONFIG.vocab, (2, 25))


def all_experts(module, x):
    """Compute every expert for every token: what the choice leaves out has no weight."""
    scores = x @ module.router.weight[...].T
    best, experts = jax.lax.top_k(scores, 2)
    shares = jnp.einsum("btk,btke->bte", jax.nn.softmax(best), jax.nn.one_hot(experts, 8))
    gate_up = jnp.einsum("btd,efd->btef", x, module.experts.gate_up.weight[...])
    hidden = jax.nn.silu(gate_up[..., 0::2]) * gate_up[..., 1::2]
    return jnp.einsum("bte,btef,edf->btd", shares, hidden, module.experts.down.weight[...])


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_all_experts(trained, batch):
    trainer, params = trained

    def expected(params):
        scores = train_demo_model.logits(trainer.model(params), batch[:, :-1], jnp.float32, all_experts)
        return train_demo_model.cross_entropy(scores, batch[:, 1:])

    def actual(params):
        scores, _ = script.routed_logits(trainer.model(params), batch[:, :-1], jnp.float32, EVERY_CHOICE)
        return train_demo_model.cross_entropy(scores, batch[:, 1:])

    ours, theirs = (jax.jit(jax.value_and_grad(f))(params) for f in (actual, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), ours, theirs)


def test_logits_are_the_decoders(trained, batch):
    trainer, params = trained

    @jax.jit
    def both(params):
        model = trainer.model(params)
        positions = jnp.broadcast_to(jnp.arange(24), (2, 24))
        expected = model.logits(model(batch[:, :-1], positions)[0])
        return expected, script.routed_logits(model, batch[:, :-1], jnp.float32, EVERY_CHOICE)

    expected, (actual, routed) = both(params)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert not routed.dropped.any()


@pytest.mark.slow
def test_losses_of_the_router(trained, batch):
    """Even use has a balance of 1; all tokens to the same two experts, with certainty, 8 / 2; and these drop most."""
    trainer, params = trained
    module = trainer.model(params).layers[0].mlp
    x = jnp.abs(jax.random.normal(jax.random.key(0), (2, 24, 32)))
    module.router.weight[...] = jnp.zeros((8, 32)).at[:2].set(100.0)
    y, routed = script.mixture(module, x, capacity=12)
    np.testing.assert_allclose(routed.load, [0.5, 0.5, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(routed.balance, 4.0, rtol=1e-5)
    np.testing.assert_allclose(routed.dropped, 0.75)
    np.testing.assert_allclose(y[0, :12], all_experts(module, x)[0, :12], rtol=1e-4, atol=1e-6)
    assert not y[0, 12:].any()  # they came too late
    assert not y[1].any()
    module.router.weight[...] = jnp.zeros((8, 32))
    even = script.mixture(module, x, capacity=48)[1]
    np.testing.assert_allclose((even.balance, even.z), (1.0, np.log(8) ** 2), rtol=1e-5)


@pytest.mark.slow
def test_trains_and_exports_one_file(library, tmp_path, capsys):
    model_dir = tmp_path / "model"
    options = ("--library", str(library), "--batch", "4", "--length", "64", "--log-every", "4", "--max-steps", "8")
    args = train_demo_model.parse(
        ["--work-dir", str(tmp_path / "work"), "--export", str(model_dir), "--learning-rate", "0.05", *options]
    )
    model = script.run(args, CONFIG)
    printed = capsys.readouterr().out
    losses = [float(line.split("loss")[1].split()[0]) for line in printed.splitlines() if "loss" in line]
    assert losses[1] < losses[0] < 5.8  # log(300) = 5.7 at the start
    assert "queue.py" in printed
    assert [line.split()[0] for line in printed.splitlines()[-3:]] == ["layer", "0", "all"]

    assert [file.name for file in model_dir.iterdir()] == ["checkpoint.safetensors"]
    leaves = read_manifest(model_dir).leaves
    assert leaves["layers.0.mlp.router.weight"].dtype == "float32"
    assert leaves["layers.0.mlp.experts.down.weight"].dtype == "bfloat16"
    loaded = load_model(model_dir)
    again = nnx.merge(loaded.graphdef, loaded.state)
    tokens = jnp.arange(20)[None]
    np.testing.assert_allclose(again(tokens, tokens)[0], model(tokens, tokens)[0], rtol=1e-4, atol=1e-5)
