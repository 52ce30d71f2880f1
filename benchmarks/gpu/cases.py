"""The shapes at which operations are timed, tuned and checked.

Timing and tuning use the shapes of real models, which `kernel_cases.py` has. Numerics are checked at other shapes,
small or awkward, against float64 (`references.py`).
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.kernel_cases import (
    Case,
    Choices,
    Heads,
    StateHeads,
    decoding,
    encoding,
    every_case,
    expert_matmul,
    gating,
    linear,
    merging,
    normed,
    permuting,
    prefill,
    prompting,
    quantized,
    quantizing,
    residual,
    stepping,
    unpermuting,
)
from jaxinfer.pallas_kernels.weights import GROUP

_VARIANTS: tuple[dict[str, Any], ...] = ({"int8": True}, {"alibi": True}, {"page_size": 32})
"""Options of attention besides the plain one: over int8 pages, with ALiBi, and over larger pages."""

_ROWS_OUTPUTS_INPUTS = ((1, 4096, 4096), (3, 1600, 1600), (7, 1024, 6400), (13, 1600, 4096), (16, 6144, 4096))


def timed() -> Iterator[Case]:
    """Yield the cases of real models: those of Llama 3 8B first, and of each model those of one row."""
    yield from sorted(every_case(), key=lambda case: (not case.name.startswith("llama3-8b"), case.rows > 1))


def checked() -> Iterator[Case]:
    """Yield shapes for numerics: common ones, and ones that tiles do not divide."""
    for fmt in ("bfloat16", "float16", "float32", "int8", "int4", "fp8"):
        for rows, outputs, inputs in _ROWS_OUTPUTS_INPUTS:
            if fmt != "int4" or inputs % GROUP == 0:
                yield from _linear_layers(rows, outputs, inputs, fmt)
    heads = Heads(32, 8, 128)
    options: dict[str, Any]
    for options in ({}, {"window": 100}, {"softcap": 30.0}):
        for batch, tokens, context in ((1, 1, 1024), (3, 1, 777), (2, 4, 333)):
            yield decoding(batch, tokens, context, heads, rotary=128, **options)
            yield prefill(batch, 16 * tokens, context, Heads(16, 16, 64), **options)
    yield decoding(2, 1, 500, Heads(16, 16, 256), rotary=64)
    for options in _VARIANTS:
        yield decoding(3, 1, 777, heads, rotary=128, **options)
        yield decoding(2, 4, 333, heads, rotary=128, **options)
        yield prefill(3, 16, 777, heads, **options)
    for page_size in (16, 32, 64):
        yield decoding(3, 1, 777, heads, rotary=128, page_size=page_size, int8=True, head_norms=True)
        yield decoding(2, 4, 333, Heads(8, 8, 64), rotary=64, page_size=page_size, head_norms=True)
        yield prefill(2, 48, 333, Heads(16, 16, 64), page_size=page_size)
    yield encoding(4, 197, 12, 64, merged=True)  # cuDNN, or plain XLA
    for tokens in (37, 64, 197, 333):  # rows that end within the 16 bytes of a copy, and one that does not
        yield encoding(4, tokens, 12, 64)
    for rows, state_heads in ((1, StateHeads(16, 32, 128, 128)), (5, StateHeads(3, 3, 64, 24))):
        yield stepping(rows, state_heads, padding=2)
    yield stepping(3, StateHeads(2, 4, 256, 80))
    yield prompting((1, 63, 64, 65, 127, 128), StateHeads(2, 4, 64, 64))
    yield prompting((300, 5, 129), StateHeads(4, 8, 128, 128))
    for rows, inputs in ((1, 4096), (7, 1600), (64, 14_336)):
        yield from quantizing(rows, inputs)
    for rows, outputs, inputs in ((32, 1024, 1600), (33, 1024, 1600), (200, 4096, 4096)):
        yield quantized(rows, outputs, inputs)
    for tokens in (1, 16, 100):
        yield from _experts(Choices(tokens, experts=8, k=2), embed=1024, hidden=512)
    yield merging(4, 197, 768, r=16, padding=True)
    yield merging(4, 197, 768, r=16)


def tiny() -> Iterator[Case]:
    """Yield one small case of each kind, for a dry run."""
    yield from _linear_layers(2, 64, 128, "bfloat16")
    for fmt in ("int8", "int4"):
        yield next(_linear_layers(2, 64, 128, fmt))
    for options in ({}, *_VARIANTS):
        yield decoding(1, 1, 40, Heads(2, 1, 64), rotary=64, **options)
        yield prefill(1, 8, 40, Heads(2, 1, 64), **options)
    yield decoding(1, 1, 40, Heads(2, 1, 64), rotary=64, page_size=64, head_norms=True)
    yield encoding(1, 8, 1, 64, merged=True)
    yield encoding(1, 8, 1, 64)
    yield stepping(2, StateHeads(1, 2, 64, 40), padding=1)
    yield prompting((3, 5), StateHeads(1, 1, 64, 64))
    yield from quantizing(2, 128)
    yield quantized(32, 64, 128)
    yield from _experts(Choices(4, experts=4, k=2), embed=64, hidden=64)
    yield merging(3, 16, 64, r=3, padding=True)
    yield merging(1, 16, 64, r=3)


def tiny_timed() -> Iterator[Case]:
    """Yield a linear layer and an attention, which other libraries have too, for a dry run."""
    yield next(_linear_layers(2, 64, 128, "bfloat16"))
    yield prefill(1, 8, 16, Heads(1, 1, 64))


def _linear_layers(rows: int, outputs: int, inputs: int, fmt: str) -> Iterator[Case]:
    """Yield a layer with different fusions: none; LayerNorm and GELU; RMSNorm and a gate; a bias and a residual."""
    name, sizes = f"{rows} x {inputs} by {outputs}, {fmt}", (rows, outputs, inputs, fmt)
    yield linear(name, *sizes)
    yield normed(f"{name}, GELU", *sizes, shifted=True, biased=True, activation="gelu_tanh")
    yield normed(f"{name}, gated", *sizes, activation="silu", gated=True)
    yield residual(name, *sizes, biased=True)


def _experts(choices: Choices, *, embed: int, hidden: int) -> Iterator[Case]:
    """Yield the operations of an MoE layer."""
    yield gating(choices)
    yield gating(choices, capacity=-(-choices.rows // (2 * choices.experts)))  # drops some choices
    yield permuting(choices, embed)
    yield unpermuting(choices, embed)
    yield expert_matmul(choices, hidden, embed)
