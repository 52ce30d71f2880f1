"""A profile shaped like the paper's Fig. 4: more tokens, more seconds, a little more accuracy; a cliff at -20."""

import numpy as np

from jaxinfer.elastic.scheduling.profile import ServingProfile

LEVELS = (-20, -15, -10, -5, 0, 2, 4, 8)
THROUGHPUT = dict(zip(LEVELS, (1250, 1000, 850, 700, 580, 550, 500, 430), strict=True))
SIZES = (1, 2, 4, 8, 16, 32, 64)
TASKS = ("cifar10", "cifar100", "eurosat")
START = 0.005  # seconds of a batch beside those that grow with it


def profile(scale=1.0):
    """`scale` times as slow as the paper's GPU."""
    seconds = {
        (level, size): scale * (START + size * (64 / THROUGHPUT[level] - START) / 64)
        for level in LEVELS
        for size in SIZES
    }
    drops = dict(zip(LEVELS, (0.35, 0.06, 0.03, 0.01, 0.0, -0.01, -0.012, -0.015), strict=True))
    accuracy = {
        (task, level): best - drops[level]
        for task, best in zip(TASKS, (0.97, 0.85, 0.96), strict=True)
        for level in LEVELS
    }
    return ServingProfile(levels=LEVELS, sizes=SIZES, seconds=seconds, accuracy=accuracy)


def models():
    """Three of them in place of levels: half, once and three times as slow, the last a little more accurate."""
    plain, scales = profile(), (0.5, 1.0, 3.0)
    return ServingProfile(
        levels=(0, 1, 2),
        sizes=SIZES,
        seconds={(model, size): scale * plain.seconds[0, size] for model, scale in enumerate(scales) for size in SIZES},
        accuracy={(task, model): plain.accuracy[task, 0] + 0.01 * (model - 1) for task in TASKS for model in (0, 1, 2)},
    )


def interval(values):
    """The mean, and the half-width of its 95% interval over seeds."""
    values = np.asarray(values)
    return values.mean(), 2.78 * values.std(ddof=1) / np.sqrt(len(values))  # Student's t of 5 values
