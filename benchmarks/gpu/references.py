"""The operations in float64 with numpy, written without regard to speed and without their definitions' help."""

import numpy as np

from pallas_kernels.weights import GROUP, Weights


def matrix(weights: Weights) -> np.ndarray:
    """The numbers that weights stand for, [N, K]."""
    kernel = np.asarray(weights.kernel)
    if weights.scale is None:
        return kernel.astype(np.float64)
    scale = np.asarray(weights.scale).astype(np.float64)
    if kernel.dtype != np.uint16:
        return kernel.astype(np.float64) * scale[:, None]
    words = kernel.reshape(len(kernel), -1, 1, GROUP // 4)
    levels = ((words >> np.array([0, 4, 8, 12], np.uint16)[:, None]) & 15).astype(np.float64) - 8
    groups = levels.reshape(len(kernel), -1, GROUP) * scale.T[:, :, None]
    return groups.reshape(len(kernel), -1)


def rounded_rows(x: np.ndarray) -> np.ndarray:
    """x as int8 with a scale per row can say it."""
    scale = np.maximum(np.abs(x.astype(np.float32)).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return np.rint(x.astype(np.float32) / scale).astype(np.float64) * scale


def product(x: np.ndarray, weights: Weights) -> np.ndarray:
    """x W^T; int8 weights round x too."""
    x = rounded_rows(x) if np.asarray(weights.kernel).dtype == np.int8 else x.astype(np.float64)
    return x @ matrix(weights).T


def linear(x: np.ndarray, weights: Weights, bias: np.ndarray | None = None) -> np.ndarray:
    y = product(x, weights)
    return y if bias is None else y + bias
