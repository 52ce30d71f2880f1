"""The weights by which rows of pixels, or of patches, are resampled: plain numpy."""

import functools
from collections.abc import Callable

import numpy as np

from jaxinfer.models.config import PositionGrid, Resampling

Kernel = Callable[[np.ndarray], np.ndarray]


def _linear(x: np.ndarray) -> np.ndarray:
    return np.clip(1 - np.abs(x), 0, None)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Weigh by cubic convolution with parameter a (Keys 1981, eq. 4, where a is -0.5)."""
    x = np.abs(x)
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x < 1, inner, np.where(x < 2, outer, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


_KEYS = -0.5  # a of Pillow's bicubic, and of PyTorch's with antialiasing
_TORCH = -0.75  # a of PyTorch's without antialiasing

_KERNELS: dict[Resampling, tuple[Kernel, float]] = {
    Resampling.BILINEAR: (_linear, 1.0),
    Resampling.BICUBIC: (functools.partial(_cubic, a=_KEYS), 2.0),
    Resampling.LANCZOS: (_lanczos, 3.0),
}
"""Each kernel, and how far it reaches."""


def resampling_matrix(old: int, new: int, resampling: Resampling) -> np.ndarray:
    """Compute the weights of Pillow's resizing, whose kernel is stretched when an image shrinks, float32 [new, old].

    Pixels beyond the border have no share; the others' shares are scaled to a sum of 1.
    """
    kernel, reach = _KERNELS[resampling]
    scale = old / new
    stretch = max(scale, 1.0)
    centres = (np.arange(new)[:, None] + 0.5) * scale
    first = np.maximum(np.trunc(centres - reach * stretch + 0.5), 0)
    last = np.minimum(np.trunc(centres + reach * stretch + 0.5), old)
    pixels = np.arange(old)
    weights = kernel((pixels + 0.5 - centres) / stretch) * ((pixels >= first) & (pixels < last))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def position_matrix(grid: PositionGrid, side: int) -> np.ndarray:
    """Compute the weights that interpolate positions along a side of their grid, float32 [side, grid.side].

    As PyTorch interpolates (bicubic, `align_corners=False`): with antialiasing as Pillow does, else between the nearest
    four, of which those beyond the border are the border's.
    """
    if grid.antialias:
        return resampling_matrix(grid.side, side, Resampling.BICUBIC)
    places = (np.arange(side) + 0.5) * (grid.side / side) - 0.5
    weights = np.zeros((side, grid.side))
    for reach in range(-1, 3):
        near = np.floor(places) + reach
        rows = np.arange(side), np.clip(near, 0, grid.side - 1).astype(int)
        np.add.at(weights, rows, _cubic(places - near, _TORCH))
    return weights.astype(np.float32)
