"""The prompts of the streaming benchmark, the same for every engine; needs the standard library alone."""

import random

VOCAB = 8192


def prompts(batch: int, length: int) -> list[list[int]]:
    """Draw random tokens."""
    source = random.Random(0)
    return [[source.randrange(3, VOCAB) for _ in range(length)] for _ in range(batch)]
