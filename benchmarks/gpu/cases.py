"""Every operation at every shape that is checked, timed or tuned: one flat table for each purpose.

A case says how its arguments are made, what is called, what the result should be in float64, and how many bytes and
operations a perfect implementation needs: each input read once, each output written once. Letters as in the operations'
own files.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import references
from jaxinfer.models import DecoderConfig
from jaxinfer.models.presets import preset
from pallas_kernels import weights as formats
from pallas_kernels.small_batch_linear import small_batch_linear
from pallas_kernels.weights import Weights

Make = Callable[[jax.Array], tuple[Any, ...]]

MODELS = ("llama3-8b", "gpt-j-6b", "gpt2-1.5b")
FORMATS = ("bfloat16", "int8", "int4")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One operation at one shape.

    Attributes:
      op: its name. name: the shape, in words.
      make: its arguments from a random key; can be traced.
      call: the operation, of these arguments.
      reference: the same in float64, of numpy arrays; leaves that come after those it returns are not compared.
      tolerance: of the relative error of each result, in the Frobenius norm.
      bytes, flops: what one call needs. operands: the dtype of the products' operands.
      rows: tokens, on which XLA's options depend.
      state: the argument that the operation returns anew as its second result, in place.
      others: implementations in JAX by other authors, of these arguments.
      torch: what to ask PyTorch's process for.
    """

    op: str
    name: str
    make: Make
    call: Callable[..., Any]
    reference: Callable[..., Any]
    tolerance: float
    bytes: int
    flops: int = 0
    operands: str = "bfloat16"
    rows: int = 1
    state: int | None = None
    others: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    torch: Mapping[str, Any] | None = None

    @functools.cached_property
    def shapes(self) -> tuple[Any, ...]:
        """The arguments' shapes."""
        return jax.eval_shape(self.make, jax.random.key(0))

    @property
    def weight_dtype(self) -> np.dtype:
        """What the engine would tell the compiler that the weights are in."""
        return np.dtype(self.operands)

    @property
    def title(self) -> str:
        return f"{self.op}: {self.name}"


def _bytes(*trees: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(trees))


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _weights(key: jax.Array, outputs: int, inputs: int, form: str) -> Weights:
    """Random weights whose products with normal inputs are about normal."""
    matrix = _normal(key, (outputs, inputs), jnp.float32, inputs**-0.5)
    return formats.quantize(matrix, form) if form in (*FORMATS[1:], "fp8") else Weights(matrix.astype(form))


# Products of a few rows with a matrix


def linear(rows: int, outputs: int, inputs: int, form: str, *, bias: bool = False, name: str = "") -> Case:
    """x W^T + b."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        x, w, b = jax.random.split(key, 3)
        dtype = form if form in ("float32", "float16") else jnp.bfloat16
        vector = (_normal(b, (outputs,), jnp.float32),) if bias else ()
        return _normal(x, (rows, inputs), dtype), _weights(w, outputs, inputs, form), *vector

    return Case(
        op="small_batch_linear",
        name=name or f"{rows} x {inputs} by {outputs}, {form}",
        make=make,
        call=small_batch_linear,
        reference=references.linear,
        tolerance={"float32": 1e-5, "float16": 5e-4}.get(form, 4e-3),
        bytes=_bytes(jax.eval_shape(make, jax.random.key(0))) + rows * outputs * 2,
        flops=2 * rows * outputs * inputs,
        operands="int8" if form == "int8" else "bfloat16",
        rows=rows,
        torch={"what": "linear", "weights": form, "rows": rows, "outputs": outputs, "inputs": inputs},
    )


def matrices(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """The outputs and inputs of a decoder layer's matrices, and of the head."""
    attention, embed, hidden = config.attention, config.embed, config.mlp.hidden
    heads = attention.q_heads * attention.head_dim
    return {
        "qkv": (heads + 2 * attention.kv_heads * attention.head_dim, embed),
        "out": (embed, heads),
        "up": (hidden * (2 if config.mlp.gated else 1), embed),
        "down": (embed, hidden),
        "head": (config.vocab, embed),
    }


def timed(*, quick: bool) -> Iterator[Case]:
    """The operations of the end-to-end models, the most telling first."""
    for rows in (1,) if quick else (1, 8):
        for form in FORMATS:
            for model in MODELS[:1] if quick else MODELS:
                for name, (outputs, inputs) in matrices(preset(model)).items():
                    yield linear(rows, outputs, inputs, form, name=f"{model} {name}, {form}, {rows} rows")


def checked() -> Iterator[Case]:
    """Shapes for numerics: small ones, and ones that divide badly."""
    for form in ("bfloat16", "float16", "float32", "int8", "int4", "fp8"):
        for rows, outputs, inputs in ((1, 4096, 4096), (3, 1600, 1600), (8, 1024, 6400), (16, 6144, 4096)):
            if form != "int4" or inputs % formats.GROUP == 0:
                yield linear(rows, outputs, inputs, form, bias=rows == 3)


def tiny() -> Iterator[Case]:
    """One of each kind, for a dry run."""
    for form in FORMATS:
        yield linear(2, 128, 256, form, bias=True)
