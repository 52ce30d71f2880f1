"""How the small-batch kernel multiplies each weight format: operand dtypes in shared memory and the mma sequence.

All formats use `mma.sync` with the weights as the left operand. Converting a format must keep up with memory: while an
H200 delivers 4.8 TB/s, a lane can issue six instructions per one-byte weight and three per half-byte weight.

| format | instructions per weight | conversion |
|---|---|---|
| float16, bfloat16 | 0 | none |
| float32 | 5 | split into three bfloat16 |
| int8 | 0 | none; rows of x are int8 |
| fp8 | 2.5 | to float16, float32, bfloat16: there is no mma of fp8 with bfloat16 |
| int4 | 1.4 | shift and mask put the nibbles into the mantissa of 128, then 136 is subtracted |
"""

import dataclasses
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxinfer.pallas_kernels.mosaic import fragmented_array, llvm, pl, plgpu, utils
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, full, load
from jaxinfer.pallas_kernels.mosaic.products import add_float32_product, split_bfloat16
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.target import UnsupportedError, interpreting
from jaxinfer.pallas_kernels.weights import GROUP, NIBBLES, Weights, is_int4


def acc_layout() -> Any:
    """The layout of an accumulator, the same for all dtypes."""
    return plgpu.Layout.MMA_ACC(jnp.bfloat16)


def _lhs(dtype: Any = jnp.bfloat16) -> Any:
    """The layout of a left operand; the default stands for all dtypes of 16 bits."""
    return plgpu.Layout.MMA_LHS(dtype)


def _rhs(dtype: Any = jnp.bfloat16) -> Any:
    """The layout of a right operand."""
    return plgpu.Layout.MMA_RHS(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """Float weights in x's dtype; the base class of the other formats.

    Attributes:
      dtype: dtype of x in memory. x: dtype of x as an mma operand, in shared memory. weights: dtype of the weight.
      accumulator: dtype of the accumulator. per_element: inputs per element of the weight.
      per_scale: inputs per scale; 0 without scales, 1 if there is one scale per output.
      slices: the format's name if a tile is multiplied in slices of its inputs, which tiles of 8 rows allow; else "".
      swizzle: bytes of a row of a swizzled TMA tile.
    """

    dtype: np.dtype
    x: np.dtype
    weights: np.dtype
    accumulator: ClassVar[Any] = jnp.float32
    per_element: ClassVar[int] = 1
    per_scale: ClassVar[int] = 0
    slices: ClassVar[str] = ""
    swizzle: int = 128

    @property
    def quantizes(self) -> bool:
        """Whether the kernel quantises rows of x before the product."""
        return False

    def multiply(self, acc: jax.Array, weights: Ref, x: Ref, scales: list[Ref]) -> jax.Array:
        """acc + W x^T for one tile of inputs.

        acc: [outputs, columns]. In shared memory: weights [outputs, inputs / per_element]; x [columns, inputs], or one
        row for all columns; scales, for a grouped format: one ref [outputs] per group of inputs.
        """
        lhs, rhs = load(weights, _lhs()), _load_x(x, _rhs(), acc)
        multiply = add_float32_product if self.dtype == jnp.float32 else plgpu.mma
        return multiply(acc, lhs, rhs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Operand(Operand):
    """Int8 weights; rows of x are quantised by `quantize_rows`, or by the kernel in the same way.

    Attributes:
      quantized: whether rows of x come quantised.
    """

    accumulator = jnp.int32
    per_scale = 1
    quantized: bool = False

    @property
    @override
    def quantizes(self) -> bool:
        return not self.quantized

    @override
    def multiply(self, acc: jax.Array, weights: Ref, x: Ref, scales: list[Ref]) -> jax.Array:
        return plgpu.mma(acc, load(weights, _lhs(jnp.int8)), _load_x(x, _rhs(jnp.int8), acc))


class Fp8Operand(Operand):
    """fp8 (float8_e4m3fn) weights."""

    per_scale = 1
    slices = "fp8"

    @override
    def multiply(self, acc: jax.Array, weights: Ref, x: Ref, scales: list[Ref]) -> jax.Array:
        for first in range(0, weights.shape[1], self.swizzle):  # in slices, to save registers
            inputs = pl.ds(first, self.swizzle)
            w = load(weights.at[:, inputs], _lhs()).astype(jnp.float16)  # exact; the only conversion that an H200 has
            if self.dtype != jnp.float16:
                w = w.astype(jnp.float32).astype(jnp.bfloat16)
            acc = _multiply_exact(acc, w, _load_x(x.at[:, inputs], _rhs(), acc))
        return acc


class Int4Operand(Operand):
    """Int4 weights, four per word, in groups with one scale each."""

    per_element = NIBBLES
    per_scale = GROUP
    slices = "int4"

    @override
    def multiply(self, acc: jax.Array, weights: Ref, x: Ref, scales: list[Ref]) -> jax.Array:
        run = GROUP // NIBBLES
        for group, scale in enumerate(scales):
            words = load(weights.at[:, pl.ds(group * run, run)], _lhs())
            partial = full(acc.shape, 0, acc.dtype, acc_layout())
            for nibble in range(NIBBLES):
                w = _levels(words, nibble, jnp.float16 if self.dtype == jnp.float16 else jnp.bfloat16)
                inputs = pl.ds(group * GROUP + nibble * run, run)
                partial = _multiply_exact(partial, w, _load_x(x.at[:, inputs], _rhs(), acc))
            acc += partial * broadcast_outputs(scale, acc.shape)
        return acc


def operand_of(weights: Weights, dtype: np.dtype, *, quantized: bool = False) -> Operand:
    """The operand class of this weight format, for x of this dtype. Raises UnsupportedError.

    Args:
      quantized: whether rows of x come quantised to int8; `dtype` is then that of the result.
    """
    stored = weights.weight.dtype
    if stored == dtype:
        return Operand(dtype=dtype, x=dtype, weights=stored)
    swizzle = 64 if weights.weight.shape[1] % 128 else 128  # 64 for K = 1600 (GPT-2 XL)
    if stored == jnp.int8:
        return Int8Operand(dtype=dtype, x=stored, weights=stored, swizzle=swizzle, quantized=quantized)
    if stored == jnp.float8_e4m3fn:
        return Fp8Operand(dtype=dtype, x=dtype, weights=stored, swizzle=swizzle)
    if is_int4(weights):
        return Int4Operand(dtype=dtype, x=dtype, weights=stored, swizzle=64)  # the words of a group
    raise UnsupportedError(f"small-batch kernel takes weights in x's dtype {dtype}, got {stored}")


def broadcast_outputs(vector: Ref, shape: tuple[int, ...]) -> jax.Array:
    """Load one number per output [outputs] and repeat it for every column of an accumulator, in float32."""
    return broadcast(load(vector, acc_layout().reduce(1)).astype(jnp.float32), shape, 0, acc_layout())


def broadcast_columns(vector: Ref, shape: tuple[int, ...]) -> jax.Array:
    """Load one number per row of x [columns] and repeat it for every output of an accumulator, in float32."""
    return broadcast(load(vector, acc_layout().reduce(0)).astype(jnp.float32), shape, 1, acc_layout())


def _load_x(x: Ref, layout: Any, acc: jax.Array) -> jax.Array:
    """Load x^T [inputs, columns] as a right operand."""
    if x.shape[0] == acc.shape[1]:
        return load(x.T, layout)
    return broadcast(load(x.at[0], layout.reduce(1)), (x.shape[1], acc.shape[1]), 0, layout)


def _multiply_exact(acc: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    """acc + w x; a float32 x is split into three bfloat16, and w is exact in bfloat16."""
    for part in reversed(split_bfloat16(x)) if x.dtype == jnp.float32 else [x]:
        acc = plgpu.mma(acc, w, part)
    return acc


def _levels(words: jax.Array, nibble: int, dtype: Any) -> jax.Array:
    """Compute the int4 values (-8 to 7) of a nibble of each word, consecutive inputs: uint16 -> `dtype`, exactly.

    A nibble n in the lowest mantissa bits of a power of two whose unit in the last place is 1 makes that power plus n.
    """
    power, bits = (1024, 0x6400) if dtype == jnp.float16 else (128, 0x4300)
    return _shift_and_mask(words, 4 * nibble, bits, dtype) - jnp.asarray(power + 8, dtype)


def _shift_and_mask(words: jax.Array, shift: int, bits: int, dtype: Any) -> jax.Array:
    """((words >> shift) & 15) | bits, reinterpreted as `dtype`. words: uint16, laid out as a left operand.

    Two adjacent words share a register, so two instructions shift and mask both. The compiler would shift each half
    separately, with seven instructions.
    """
    if interpreting():  # it does not support inline PTX
        return lax.bitcast_convert_type(((words >> shift) & 15) | jnp.uint16(bits), dtype)

    @plgpu.inline_mgpu(arg_types=(_lhs(),), return_type=plgpu.ShapeDtypeStruct(words.shape, dtype, layout=_lhs()))
    def both(_: Any, words: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.F16Type.get() if dtype == jnp.float16 else ir.BF16Type.get())
        # 0xEA: the truth table of (a & b) | c. Bits that the shift brings in from the other half are masked out.
        instruction = f"lop3.b32 $0, $1, 0x000F000F, {bits << 16 | bits}, 0xEA;"
        registers = np.empty_like(words.registers)
        for index, register in np.ndenumerate(words.registers):
            shifted = arith.shrui(utils.bitcast(register, i32), utils.c(shift, i32))
            registers[index] = utils.bitcast(llvm.inline_asm(i32, [shifted], instruction, "=r,r"), pair)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)

    return both(words)  # pyright: ignore[reportCallIssue]  # the first parameter is supplied
