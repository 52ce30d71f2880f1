"""Rotary positions (arXiv:2104.09864) and how they are scaled to longer contexts."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import PositionsConfig, RopeScaling


def rotary_frequencies(cfg: PositionsConfig) -> np.ndarray:
    """Compute the radians per position of each feature pair, scaled as configured: float32 [rotary_dim / 2]."""
    pairs = np.arange(0, cfg.rotary_dim, 2, dtype=np.float64)
    inverse = cfg.theta ** (-pairs / cfg.rotary_dim)
    match cfg.scaling:
        case None:
            pass
        case RopeScaling(kind="linear", factor=factor):
            inverse = inverse / factor
        case RopeScaling(kind="llama3") as scaling:
            wavelength = 2 * math.pi / inverse
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = np.clip((scaling.original_context / wavelength - low) / (high - low), 0.0, 1.0)
            inverse = (1 - smooth) * inverse / scaling.factor + smooth * inverse
        case RopeScaling(kind="yarn") as scaling:

            def pair_at(rotations: float) -> float:
                """The index of the feature pair that rotates this many times within the original context."""
                period = scaling.original_context / (rotations * 2 * math.pi)
                return cfg.rotary_dim * math.log(period) / (2 * math.log(cfg.theta))

            low = max(math.floor(pair_at(scaling.beta_fast)), 0)
            high = min(math.ceil(pair_at(scaling.beta_slow)), cfg.rotary_dim - 1)
            ramp = np.clip((pairs / 2 - low) / max(high - low, 1e-3), 0.0, 1.0)
            inverse = ramp * inverse / scaling.factor + (1 - ramp) * inverse
        case RopeScaling(kind="longrope") as scaling:
            inverse /= np.asarray(scaling.long_factors if scaling.longer else scaling.short_factors)
    if cfg.turning_pairs is not None:
        inverse[cfg.turning_pairs :] = 0.0
    return inverse.astype(np.float32)


def rotary_table(cfg: PositionsConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of every rotation, float32 [..., 1, rotary_dim / 2] (in bfloat16, 257 would be 256)."""
    angles = positions[..., None, None].astype(jnp.float32) * rotary_frequencies(cfg)
    factor = cfg.scaling.attention_factor if cfg.scaling else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
