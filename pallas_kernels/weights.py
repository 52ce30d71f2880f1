"""How a matrix of weights is held: in float, int8, fp8 or int4."""

from typing import NamedTuple

import jax


class Weights(NamedTuple):
    """A matrix of N outputs by K inputs, the inputs contiguous.

    Attributes:
      kernel: one of
        float [N, K] (bfloat16, float16, float32);
        int8 [N, K], multiplied by rows of x that are quantised on the fly;
        float8_e4m3fn [N, K], weights only;
        uint8 [N, K / 2], int4 in blocks of GROUP inputs, weights only: byte j of a block holds input j in its low
        four bits and input j + GROUP / 2 in its high ones, each plus 8.
      scale: None in float; float32 [N] for int8 and fp8; float32 [N, K / GROUP] for int4.
    """

    kernel: jax.Array
    scale: jax.Array | None = None


GROUP = 128
"""Inputs that share a scale in int4."""
