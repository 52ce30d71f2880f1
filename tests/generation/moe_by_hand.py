"""A mixture of experts token by token, as its papers have it: what engines on such models are compared with."""

import jax
import numpy as np

from jaxinfer.models import Decoder, TokenRows
from jaxinfer.models.config import RouterKind, SharedMix
from jaxinfer.models.layers.moe import Moe
from jaxinfer.pallas_kernels.weights import Weights, dequantize


def silu(x):
    return x / (1 + np.exp(-x))


def mlp(x, gate_up, down):
    """A gated MLP: [D], [2F, D], [D, F] -> [D]."""
    outputs = gate_up @ x
    return down @ (silu(outputs[0::2]) * outputs[1::2])


def matrix(linear):
    """What its weights represent, whichever format they have: float32 [..., N, K]."""
    scale = None if linear.scale is None else linear.scale[...]
    return np.asarray(dequantize(Weights(linear.weight[...], scale), np.float32))


def choose(router, x):
    """The experts of a token, the best first, and their weights (DeepSeek V3, arXiv:2412.19437, equations 12 to 16)."""
    cfg, logits = router.cfg, np.asarray(router.weight[...], np.float64) @ x
    softmax = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    scores = softmax if cfg.kind is RouterKind.SOFTMAX else 1 / (1 + np.exp(-logits))
    biased = scores if router.selection_bias is None else scores + np.asarray(router.selection_bias[...])
    if cfg.groups > 1:
        groups = biased.reshape(cfg.groups, -1)
        best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: cfg.groups_per_token]
        biased = np.where(np.isin(np.arange(cfg.groups), best)[:, None], groups, -np.inf).reshape(-1)
    chosen = np.argsort(-biased)[: cfg.experts_per_token]
    weights = scores[chosen] / scores[chosen].sum() if cfg.normalize else scores[chosen]
    return chosen, cfg.scale * weights


def mixture(moe: Moe, x):
    """[T, D] -> [T, D], and the experts of each token, [T, k]; no expert is ever full."""
    gate_up, down = matrix(moe.experts.gate_up), matrix(moe.experts.down)
    outputs, experts = [], []
    for token in np.asarray(x, np.float64):
        chosen, weights = choose(moe.router, token)
        y = sum(weight * mlp(token, gate_up[e], down[e]) for e, weight in zip(chosen, weights, strict=True))
        if moe.shared is not None:
            shared = mlp(token, matrix(moe.shared.gate_up), matrix(moe.shared.down))
            if moe.cfg.shared_mix is SharedMix.GATED:
                shared = shared / (1 + np.exp(-float(np.asarray(moe.shared_gate.weight[...])[0] @ token)))
            y = y + shared
        outputs.append(y)
        experts.append(chosen)
    return np.stack(outputs), np.stack(experts)


def forward(model: Decoder, ids, length=64):
    """Of one text without any cache: the logits of every position, [T, V], its experts, [T, layers, k], and its vector.

    The vector is the mean of the last hidden ones, of length 1. Texts are padded to one length, for few programs: no
    token sees what comes after it.
    """
    count, padding = len(ids), length - len(ids)
    tokens = np.pad(np.asarray(ids, np.int32), (0, padding))[None]
    x, context = model.enter((TokenRows(tokens, np.arange(length, dtype=np.int32)[None]),))
    experts = []
    for layer in model.layers:
        heads, _ = layer.attention.heads(x, layer.norm_before_attention, context, None)
        x = layer.add_attention(x, heads)
        if isinstance(layer.mlp, Moe):
            y, chosen = mixture(layer.mlp, layer.before_mlp(x)[0, :count])
            x = layer.join_mlp(x, jax.numpy.asarray(np.pad(y, ((0, padding), (0, 0)))[None], x.dtype))
            experts.append(chosen)
        else:
            x = layer.add_mlp(x)
    hidden = model.leave(x, context)[0]
    mean = np.asarray(hidden[0, :count]).mean(axis=0)
    return np.asarray(model.logits(hidden))[0, :count], np.stack(experts, axis=1), mean / np.linalg.norm(mean)
