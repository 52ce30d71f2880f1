"""The GPT-MoE of DeepSpeed Inference, section V, against its formulas written out in numpy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.models import Decoder, WeightFormat
from jaxinfer.models.abstract import leaf_name
from jaxinfer.models.config import MoeConfig, RouterConfig, SharedMix
from jaxinfer.models.presets import PRESETS

WIDTH, HEADS, HIDDEN, EXPERTS, TOKENS = 8, 2, 12, 4, 10


def config_of(k: int, mix: SharedMix | None):
    paper = PRESETS["gpt-moe-52b"]
    router = RouterConfig(experts=EXPERTS, experts_per_token=k, normalize=k > 1)
    moe = MoeConfig(router=router) if mix is None else MoeConfig(router=router, shared_hidden=HIDDEN, shared_mix=mix)
    dense = dataclasses.replace(paper.layer(0).mlp, hidden=HIDDEN)
    small = dataclasses.replace(paper, vocab=11, embed=WIDTH, layers=2, context=16)
    small = small.with_mlps((dense, dataclasses.replace(dense, moe=moe)))
    return small.with_attention(q_heads=HEADS, kv_heads=HEADS, head_dim=WIDTH // HEADS)


def norm(x, leaves, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * leaves[f"{name}.scale"] + leaves[f"{name}.bias"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def mlp(x, leaves, name, *index):
    """W2 gelu(W1 x + b1) + b2, of one expert if an index is given."""
    up, down = ((leaves[f"{name}.{n}.weight"][index], leaves[f"{name}.{n}.bias"][index]) for n in ("gate_up", "down"))
    h = x @ up[0].T + up[1]
    h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return h @ down[0].T + down[1]


def experts(x, leaves, name, k, mix):
    """Each token's best experts by their share of the softmax; both branches by theirs in Residual-MoE."""
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        shares = softmax(leaves[f"{name}.router.weight"] @ row)
        best = np.argsort(-shares)[:k]
        weights = shares[best] / (shares[best].sum() if k > 1 else 1)
        out[token] = sum(w * mlp(row, leaves, f"{name}.experts", e) for e, w in zip(best, weights, strict=True))
    if mix is None:
        return out
    shared = mlp(x, leaves, f"{name}.shared")
    parts = softmax(x @ leaves[f"{name}.shared_gate.weight"].T)
    return parts[:, :1] * out + parts[:, 1:] * shared


def attention(x, leaves, name):
    """Causal attention; rows of qkv are of one head after another, its query, key and value."""
    qkv = (x @ leaves[f"{name}.qkv.weight"].T + leaves[f"{name}.qkv.bias"]).reshape(len(x), HEADS, 3, -1)
    q, k, v = (qkv[:, :, i].swapaxes(0, 1) for i in range(3))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    heads = (softmax(scores) @ v).swapaxes(0, 1).reshape(len(x), -1)
    return heads @ leaves[f"{name}.out.weight"].T + leaves[f"{name}.out.bias"]


def logits_of(tokens, leaves, k, mix):
    x = leaves["embed.table"][tokens] + leaves["positions.table"][: len(tokens)]
    for layer in range(2):
        name = f"layers.{layer}"
        x = x + attention(norm(x, leaves, f"{name}.attention_norm"), leaves, f"{name}.attention")
        h = norm(x, leaves, f"{name}.mlp_norm")
        x = x + (experts(h, leaves, f"{name}.mlp", k, mix) if layer % 2 else mlp(h, leaves, f"{name}.mlp"))
    return norm(x, leaves, "final_norm") @ leaves["embed.table"].T


@pytest.mark.parametrize(("k", "mix"), [(1, None), (2, None), (1, SharedMix.RESIDUAL)])
def test_logits_are_those_of_the_formulas(k, mix):
    model = nnx.eval_shape(lambda: Decoder(config_of(k, mix), WeightFormat(), rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    flat, random = nnx.to_flat_state(state), np.random.default_rng(0)
    leaves = {leaf_name(path): 0.4 * random.standard_normal(leaf.get_value().shape) for path, leaf in flat}
    placed = [(path, leaf.replace(jnp.asarray(leaves[leaf_name(path)], jnp.float32))) for path, leaf in flat]
    tokens = random.integers(0, 11, TOKENS)

    @jax.jit
    def run(state):
        decoder = nnx.merge(graph, state)
        return decoder.logits(decoder(tokens[None], jnp.arange(TOKENS)[None])[0])

    logits = run(nnx.from_flat_state(placed))
    np.testing.assert_allclose(logits[0], logits_of(tokens, leaves, k, mix), rtol=1e-4, atol=1e-4)
