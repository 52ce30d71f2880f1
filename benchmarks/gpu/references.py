"""The operations in float64 numpy: slow, and independent of the plain-JAX implementations."""

from typing import Any

import numpy as np

from jaxinfer.pallas_kernels import KVPages, RecurrentState
from jaxinfer.pallas_kernels.moe import Routing
from jaxinfer.pallas_kernels.weights import GROUP, Weights


def matrix(weights: Weights) -> np.ndarray:
    """Dequantise weights, [N, K]."""
    weight = np.asarray(weights.weight)
    if weights.scale is None:
        return weight.astype(np.float64)
    scale = np.asarray(weights.scale).astype(np.float64)
    if weight.dtype != np.uint16:
        return weight.astype(np.float64) * scale[:, None]
    words = weight.reshape(len(weight), -1, 1, GROUP // 4)
    levels = ((words >> np.array([0, 4, 8, 12], np.uint16)[:, None]) & 15).astype(np.float64) - 8
    groups = levels.reshape(len(weight), -1, GROUP) * scale.T[:, :, None]
    return groups.reshape(len(weight), -1)


def rounded_rows(x: np.ndarray) -> np.ndarray:
    """Round x to int8 with a scale per row, dequantised."""
    scale = np.maximum(np.abs(x.astype(np.float32)).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return np.rint(x.astype(np.float32) / scale).astype(np.float64) * scale


def matmul(x: np.ndarray, weights: Weights) -> np.ndarray:
    """Compute `x W^T`; with int8 weights, x is rounded too."""
    x = rounded_rows(x) if np.asarray(weights.weight).dtype == np.int8 else x.astype(np.float64)
    return x @ matrix(weights).T


def linear(x: np.ndarray, weights: Weights, bias: np.ndarray | None = None) -> np.ndarray:
    """x W^T + b."""
    y = matmul(x, weights)
    return y if bias is None else y + bias


def linear_residual(x: np.ndarray, weights: Weights, residual: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """residual + (x W^T + b)."""
    return residual.astype(np.float64) + linear(x, weights, bias)


def normalized(x: np.ndarray, scale: np.ndarray, shift: np.ndarray | None, *, eps: float) -> np.ndarray:
    """Compute LayerNorm, or RMSNorm if `shift` is None."""
    y = x.astype(np.float64)
    if shift is not None:
        y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * scale
    return y if shift is None else y + shift


def activated(x: np.ndarray, name: str | None) -> np.ndarray:
    """Apply an activation, if there is one."""
    if name is None:
        return x
    if name == "silu":
        return x / (1 + np.exp(-x))
    assert name == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm_linear(
    x: np.ndarray,
    weights: Weights,
    scale: np.ndarray,
    shift: np.ndarray | None,
    bias: np.ndarray | None,
    *,
    eps: float,
    activation: str | None = None,
    gated: bool = False,
) -> np.ndarray:
    """Compute a norm, a linear layer and an activation.

    Normalised rows are rounded once: to int8, or else to x's dtype.
    """
    y = normalized(x, scale, shift, eps=eps)
    y = linear(y if np.asarray(weights.weight).dtype == np.int8 else y.astype(x.dtype), weights, bias)
    return activated(y[..., ::2], activation) * y[..., 1::2] if gated else activated(y, activation)


def _attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    *,
    scale: float,
    softcap: float | None = None,
    bias: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Compute one row: q [T, Hq, K]; k, v [S, Hkv, K]; visible [T, S]; bias [Hq, T, S]."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = scale * np.einsum("thk,shk->hts", q.astype(np.float64), k)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible, scores + bias, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shk->thk", weights / weights.sum(-1, keepdims=True), v)


def paged_attention(
    q: np.ndarray,
    pages: KVPages,
    table: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi: np.ndarray | None = None,
) -> np.ndarray:
    """Attend causally from the queries of each row to the keys in its pages."""
    rows, caches = [], dequantized(pages)
    for row, taken, at in zip(q, table, positions, strict=True):
        k, v = (x[taken].reshape(-1, *x.shape[2:]) for x in caches)
        distance = at[:, None] - np.arange(len(k))
        visible = (distance >= 0) & (distance < (window or len(k)))
        bias = 0.0 if alibi is None else -alibi[:, None, None] * distance
        rows.append(_attention(row, k, v, visible, scale=scale, softcap=softcap, bias=bias))
    return np.stack(rows)


def dequantized(pages: KVPages) -> list[np.ndarray]:
    """Dequantise the keys and values of all pages."""
    caches = [np.asarray(x).astype(np.float64) for x in pages[:2]]
    if pages.k_scale is None:
        return caches
    return [x * np.asarray(scale, np.float64)[:, None, :, None] for x, scale in zip(caches, pages[2:], strict=True)]


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, seen: np.ndarray, *, scale: float
) -> np.ndarray:
    """Attend to all keys but padding; padding queries give zeros. seen: lengths [B], or sizes of the keys [B, S]."""
    sizes = seen if seen.ndim == 2 else np.arange(k.shape[1]) < seen[:, None]
    biases = np.log(np.maximum(sizes.astype(np.float64), 1e-300))
    rows = zip(q, k, v, sizes, biases, strict=True)
    heads = [_attention(row, k, v, size > 0, scale=scale, bias=bias) for row, k, v, size, bias in rows]
    return np.where((positions >= 0)[..., None, None], np.stack(heads), 0.0)


def decode_attention(
    qkv: np.ndarray,
    pages: KVPages,
    table: np.ndarray,
    positions: np.ndarray,
    rotary: tuple[np.ndarray, ...],
    norms: tuple[np.ndarray, ...] | None,
    *,
    norm_eps: float = 0.0,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Compute the heads' outputs, and for a float cache the updated pages.

    New tokens of an int8 cache stay as they are, since rounding a few of many keys changes little.
    """
    kv_heads, size = pages.k.shape[2:]
    grouped = qkv.astype(np.float64).reshape(*qkv.shape[:2], kv_heads, -1, size)
    q = grouped[..., :-2, :].reshape(*qkv.shape[:2], -1, size)
    k = grouped[..., -2, :]
    if norms is not None:
        q, k = (normalized(x, scale, None, eps=norm_eps) for x, scale in zip((q, k), norms, strict=True))
    q, k = (_rotated(x, *rotary) for x in (q, k))
    caches = dequantized(pages)
    for cache, new in zip(caches, (k, grouped[..., -1, :]), strict=True):
        for row, at in enumerate(positions):
            cache[table[row, at // cache.shape[1]], at % cache.shape[1]] = new[row]
    heads = paged_attention(q, KVPages(*caches), table, positions, **options)  # type: ignore[arg-type]
    return heads.reshape(*qkv.shape[:2], -1), *(caches if pages.k_scale is None else ())


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = cos.shape[-1]
    first, second, rest = np.split(x, (half, 2 * half), axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def gated_delta_rule(
    qkv: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    weight: np.ndarray,
    cache: RecurrentState,
    slot: np.ndarray,
    positions: np.ndarray,
    *,
    key_dim: int,
) -> tuple[np.ndarray, ...]:
    """Move states on token by token: outputs, 0 for padding, the convolution's inputs, and all states."""
    conv, states = (np.array(x, np.float64) for x in (cache.conv, cache.state))
    output = np.zeros((*decay.shape, states.shape[-1]))
    for row, token in np.argwhere(positions >= 0):
        at = slot[row]
        if positions[row, token] == 0:
            conv[at], states[at] = 0, 0
        window = np.concatenate([conv[at], qkv[row, token, None].astype(np.float64)])  # [L, Hk, F]
        conv[at] = window[1:]
        x = activated(np.einsum("lhf,hfl->hf", window, weight.astype(np.float64)), "silu")
        q, k, v = np.split(x, (key_dim, 2 * key_dim), axis=-1)
        q, k = (y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
        q, k = (np.repeat(y, decay.shape[-1] // len(q), axis=0) for y in (q * key_dim**-0.5, k))
        state = np.exp(decay[row, token].astype(np.float64))[:, None, None] * states[at]
        error = v.reshape(len(k), -1) - np.einsum("hkv,hk->hv", state, k)
        states[at] = state + np.einsum("hk,hv->hkv", k, beta[row, token].astype(np.float64)[:, None] * error)
        output[row, token] = np.einsum("hkv,hk->hv", states[at], q)
    return output, conv, states


def top_k_gating(logits: np.ndarray, *, k: int, capacity: int | None = None) -> tuple[np.ndarray, ...]:
    """Compute the fields of a `Routing`."""
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    chosen = np.exp(np.take_along_axis(logits.astype(np.float64), experts, axis=1))
    weights = chosen / chosen.sum(1, keepdims=True)
    order = np.argsort(experts.reshape(-1), kind="stable")
    sizes = np.bincount(experts.reshape(-1), minlength=logits.shape[1])
    offsets, rows = np.cumsum(sizes) - sizes, np.argsort(order).reshape(experts.shape)
    if capacity is None:
        return experts, weights, rows, order // k, offsets, sizes
    position, size = rows - offsets[experts], capacity * logits.shape[1]
    rows = np.where(position < capacity, experts * capacity + position, size)
    tokens = np.full(size + 1, len(logits))
    tokens[rows] = np.arange(len(logits))[:, None]  # dropped choices in the last place, which is cut off
    offsets = np.arange(logits.shape[1]) * capacity
    return experts, np.where(rows < size, weights, 0), rows, tokens[:-1], offsets, np.minimum(sizes, capacity)


def permute(x: np.ndarray, routing: Routing) -> np.ndarray:
    """Copy each row's token."""
    return x.astype(np.float64)[np.asarray(routing.tokens)]


def unpermute(y: np.ndarray, routing: Routing) -> np.ndarray:
    """Compute the weighted sum of the rows of each token."""
    return np.einsum(
        "nk,nkd->nd", np.asarray(routing.weights, np.float64), y.astype(np.float64)[np.asarray(routing.rows)]
    )


def grouped_matmul(x: np.ndarray, weights: Weights, offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """x W^T, with the matrix of each row's expert."""
    x, matrices = x.astype(np.float64), np.asarray(weights.weight, np.float64)
    experts = zip(offsets, sizes, matrices, strict=True)
    return np.concatenate([x[first : first + size] @ matrix.T for first, size, matrix in experts])


def merge_tokens(
    x: np.ndarray, size: np.ndarray, metric: np.ndarray, *, r: int, protected: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Merge tokens row by row and one by one, as the paper describes it.

    Padding is only at the ends of rows, and less than half of them: padding tokens of A are removed before others,
    those of B are no destination.
    """
    unit = metric / np.linalg.norm(metric.astype(np.float64), axis=-1, keepdims=True)
    merged, sizes = [], []
    for tokens, counts, unit_row in zip(x.astype(np.float64), size.astype(np.float64), unit, strict=True):
        even, odd = np.arange(0, len(tokens), 2), np.arange(1, len(tokens), 2)
        scores = unit_row[even] @ unit_row[odd].T
        scores[even < protected] = -np.inf
        scores[:, (odd < protected) | (counts[odd] == 0)] = -np.inf
        scores[counts[even] == 0] = np.inf
        moving = np.argsort(-scores.max(1), kind="stable")[:r]
        partner = scores.argmax(1)
        sums, total = tokens[odd] * counts[odd, None], counts[odd].copy()
        for index in moving:
            sums[partner[index]] += tokens[even[index]] * counts[even[index]]
            total[partner[index]] += counts[even[index]]
        kept = np.delete(even, moving)
        counts = np.concatenate([counts[kept], total])
        merged.append(np.concatenate([tokens[kept], sums / np.maximum(total, 1e-300)[:, None]]) * (counts > 0)[:, None])
        sizes.append(counts)
    return np.stack(merged), np.stack(sizes)
