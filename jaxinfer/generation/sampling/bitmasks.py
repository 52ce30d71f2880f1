"""Token bitmasks: uint32 [bitmask_words(vocab)]; bit i % 32 of word i // 32 says whether token i may be chosen."""

from collections.abc import Collection

import numpy as np


def bitmask_words(vocab: int) -> int:
    """Return how many 32-bit words hold one bit for each token."""
    return -(-vocab // 32)


def bitmask_of(tokens: Collection[int], vocab: int) -> np.ndarray:
    """Make a bitmask of these tokens only."""
    flags = np.zeros(32 * bitmask_words(vocab), bool)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
