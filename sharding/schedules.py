"""Schedules of a pipeline as data: which micro-batch each stage works on at each tick.

A tick is the time that a stage takes for one micro-batch; all stages begin a tick together. Micro-batch m enters the
first stage for its pass g at tick g * stride + m and goes on by one stage a tick (DeepSpeed Inference, section IV-C1).
The compiled ring asks `ring_job` with traced numbers what a stage works on, so it runs the same schedules.
"""

from typing import Any


def queued_stride(stages: int, micro_batches: int) -> int:
    """Return the ticks between two passes of a micro-batch if generated tokens are queued (Fig. 2b).

    A micro-batch enters again as soon as its token has come back, and the first stage is free.
    """
    return max(stages, micro_batches)


def drained_stride(stages: int, micro_batches: int) -> int:
    """Return the ticks between two passes of a micro-batch if the pipeline drains after each token (Fig. 2a)."""
    return micro_batches + stages - 1


def ring_ticks(stages: Any, micro_batches: Any, passes: Any, stride: Any) -> Any:
    """Return how many ticks all passes of all micro-batches take; arguments may be traced."""
    return (passes - 1) * stride + micro_batches + stages - 1


def ring_job(tick: Any, stage: Any, *, micro_batches: Any, passes: Any, stride: Any) -> tuple[Any, Any, Any]:
    """Return (micro-batch, pass, whether there is one) of a stage at a tick; arguments may be traced."""
    entered = tick - stage
    number, micro_batch = entered // stride, entered % stride
    return micro_batch, number, (entered >= 0) & (micro_batch < micro_batches) & (number < passes)
