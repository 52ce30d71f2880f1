"""Router logits of every kind, and what every routing must be."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels.moe import Routing

HARD_LOGITS = ("one", "equal", "some nan", "all nan", "infinite", "all infinite", "all -infinite")


def logits_of(tokens: int, experts: int, kind: str = "random", seed: int = 0) -> jax.Array:
    """float32 [N, E]."""
    rng = np.random.default_rng(seed)
    normal, shape = rng.normal(size=(tokens, experts)), (tokens, experts)
    logits = {
        "random": normal,
        "ties": rng.integers(-1, 2, shape),
        "masked": np.where(np.arange(experts) % 3 == 0, normal, -np.inf),
        "one": np.tile(-np.arange(experts), (tokens, 1)),  # all tokens to the same experts
        "equal": np.zeros(shape),
        "some nan": np.where(rng.uniform(size=shape) < 0.4, np.nan, normal),
        "all nan": np.full(shape, np.nan),
        "infinite": rng.choice([np.inf, -np.inf, np.nan, 3e38, -3e38, 0.0], shape),
        "all infinite": np.full(shape, np.inf),
        "all -infinite": np.full(shape, -np.inf),
    }[kind]
    return jnp.asarray(logits, jnp.float32)


def check_in_range(routing: Routing, logits: jax.Array, k: int, capacity: int | None, *, normalize: bool) -> None:
    """Every index is valid and the tables agree, whatever the logits; NaN is chosen only where nothing else is left."""
    experts, weights, rows, tokens, offsets, sizes = map(np.asarray, routing)
    (count, num_experts), missing = logits.shape, np.isnan(logits)
    size = count * k if capacity is None else num_experts * capacity
    assert ((experts >= 0) & (experts < num_experts)).all()
    assert all(len(set(chosen)) == k for chosen in experts)
    assert (np.take_along_axis(missing, experts, axis=1).sum(1) == np.maximum(k - (~missing).sum(1), 0)).all()
    kept = rows < size
    assert (rows >= 0).all()
    assert (rows[~kept] == size).all()
    assert len(np.unique(rows[kept])) == kept.sum() == sizes.sum()
    assert ((offsets[experts] <= rows) & (rows < (offsets + sizes)[experts]))[kept].all()
    assert (tokens[rows[kept]] == np.nonzero(kept)[0]).all()
    assert (np.delete(tokens, rows[kept]) == count).all()
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    assert (weights.sum(1) <= 1 + 1e-6).all()
    if normalize and capacity is None:
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
