"""How the small-batch kernel multiplies each format of weights: what is held in shared memory, what a step computes.

All multiply by `mma.sync`, the weights as its left operand. What a format adds has to fit between two loads: while an
H200 delivers 4.8 TB/s a lane has six instructions for a weight of a byte, three for one of half a byte.

| format | instructions a weight | how |
|---|---|---|
| float16, bfloat16 | 0 | as they come |
| float32 | 5 | three parts in bfloat16 |
| int8 | 0 | as they come, times rows of x in int8 |
| fp8 | 2.5 | to float16, to float32, to bfloat16: there is no product of fp8 with bfloat16 |
| int4 | 1.4 | a shift and a mask make nibbles the mantissas of 128, of which 136 is subtracted |
"""

import dataclasses
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.dispatch import UnsupportedError, interpreting
from pallas_kernels.weights import GROUP, NIBBLES, Weights, is_int4

ACC = plgpu.Layout.MMA_ACC(jnp.bfloat16)  # the same for all dtypes
_LHS, _RHS = plgpu.Layout.MMA_LHS(jnp.bfloat16), plgpu.Layout.MMA_RHS(jnp.bfloat16)  # for 16 bits
_INT8_LHS, _INT8_RHS = plgpu.Layout.MMA_LHS(jnp.int8), plgpu.Layout.MMA_RHS(jnp.int8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """Float weights, of x's dtype; and what the other formats have in common with them.

    Attributes:
      dtype: of x in memory. x: of x as an operand, in shared memory. weights: of the kernel, in memory.
      accumulator: of the product. per_element: inputs that an element of the kernel holds.
      per_scale: inputs that share a scale; 0 without scales, 1 where all inputs of an output have the same.
      swizzle: bytes of a row of the tiles that TMA swizzles.
    """

    dtype: np.dtype
    x: np.dtype
    weights: np.dtype
    accumulator: ClassVar[Any] = jnp.float32
    per_element: ClassVar[int] = 1
    per_scale: ClassVar[int] = 0
    swizzle: int = 128

    @property
    def quantizes(self) -> bool:
        """Whether rows of x are quantised before the product."""
        return self.x != self.dtype

    def multiply(self, acc: jax.Array, weights: Any, x: Any, scales: Any) -> jax.Array:
        """acc + W x^T, a step.

        acc: [outputs, columns]. In shared memory: weights [outputs, inputs / per_element]; x [columns, inputs], or one
        row for all columns; scales, where they differ between inputs: a reference for each [outputs].
        """
        w, x = _load(weights, _LHS), _load_x(x, _RHS, acc)
        if self.dtype != jnp.float32:
            return plgpu.mma(acc, w, x)
        # As XLA's BF16_BF16_F32_X6: the products of the parts that matter, the smallest first.
        w_parts, x_parts = bfloat16_parts(w), bfloat16_parts(x)
        for i, j in ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0)):
            acc = plgpu.mma(acc, w_parts[i], x_parts[j])
        return acc


class Int8Operand(Operand):
    """Int8 weights, times rows of x that the kernel quantises as `quantize_rows` does."""

    accumulator = jnp.int32
    per_scale = 1

    @override
    def multiply(self, acc: jax.Array, weights: Any, x: Any, scales: Any) -> jax.Array:
        return plgpu.mma(acc, _load(weights, _INT8_LHS), _load_x(x, _INT8_RHS, acc))


class Fp8Operand(Operand):
    """Float8_e4m3fn weights."""

    per_scale = 1

    @override
    def multiply(self, acc: jax.Array, weights: Any, x: Any, scales: Any) -> jax.Array:
        for first in range(0, weights.shape[1], self.swizzle):  # not all at once: registers would not hold it
            inputs = pl.ds(first, self.swizzle)
            w = _load(weights.at[:, inputs], _LHS).astype(jnp.float16)  # exactly; an H200 has no other conversion
            if self.dtype != jnp.float16:
                w = w.astype(jnp.float32).astype(jnp.bfloat16)
            acc = _multiply_exact(acc, w, _load_x(x.at[:, inputs], _RHS, acc))
        return acc


class Int4Operand(Operand):
    """Int4 weights, four to a word, in groups of a scale."""

    per_element = NIBBLES
    per_scale = GROUP

    @override
    def multiply(self, acc: jax.Array, weights: Any, x: Any, scales: Any) -> jax.Array:
        run = GROUP // NIBBLES
        for group, scale in enumerate(scales):
            words = _load(weights.at[:, pl.ds(group * run, run)], _LHS)
            partial = plgpu.layout_cast(jnp.zeros(acc.shape, acc.dtype), ACC)
            for nibble in range(NIBBLES):
                w = _levels(words, nibble, jnp.float16 if self.dtype == jnp.float16 else jnp.bfloat16)
                inputs = pl.ds(group * GROUP + nibble * run, run)
                partial = _multiply_exact(partial, w, _load_x(x.at[:, inputs], _RHS, acc))
            acc += partial * per_output(scale, acc.shape)
        return acc


def operand_of(weights: Weights, dtype: np.dtype) -> Operand:
    """How weights of this format are multiplied with x of this dtype. Raises UnsupportedError."""
    kernel = weights.kernel.dtype
    if kernel == dtype:
        return Operand(dtype=dtype, x=dtype, weights=kernel)
    swizzle = 64 if weights.kernel.shape[1] % 128 else 128  # as the K of GPT-2 XL, 1600, allows
    if kernel == jnp.int8:
        return Int8Operand(dtype=dtype, x=kernel, weights=kernel, swizzle=swizzle)
    if kernel == jnp.float8_e4m3fn:
        return Fp8Operand(dtype=dtype, x=dtype, weights=kernel, swizzle=swizzle)
    if is_int4(weights):
        return Int4Operand(dtype=dtype, x=dtype, weights=kernel, swizzle=64)  # the words of a group
    raise UnsupportedError(f"small-batch kernel takes weights in x's dtype {dtype}, got {kernel}")


def per_output(vector: Any, shape: tuple[int, ...]) -> jax.Array:
    """A vector of the outputs [outputs] in memory, for every column of an accumulator, in float32."""
    return spread(_load(vector, ACC.reduce(1)).astype(jnp.float32), 0, shape, ACC)


def per_column(vector: Any, shape: tuple[int, ...]) -> jax.Array:
    """A vector of the rows of x [columns], in shared memory, for every output of an accumulator, in float32."""
    return spread(_load(vector, ACC.reduce(0)).astype(jnp.float32), 1, shape, ACC)


def spread(vector: jax.Array, axis: int, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """The vector along this axis of a matrix, the same along the other."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), layout)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _load_x(x: Any, layout: Any, acc: jax.Array) -> jax.Array:
    """x^T [inputs, columns] as a right operand."""
    if x.shape[0] == acc.shape[1]:
        return _load(x.T, layout)
    return spread(_load(x.at[0], layout.reduce(1)), 0, (x.shape[1], acc.shape[1]), layout)


def _multiply_exact(acc: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    """acc + w x, for weights that are exact in the dtype of the product where x is float32."""
    for part in reversed(bfloat16_parts(x)) if x.dtype == jnp.float32 else [x]:
        acc = plgpu.mma(acc, w, part)
    return acc


def bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 whose sum is x, exactly: eight bits of its 24 each."""
    parts = []
    for _ in range(2):
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32)
        parts.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*parts, x.astype(jnp.bfloat16)]


def _levels(words: jax.Array, nibble: int, dtype: Any) -> jax.Array:
    """The levels -8 to 7 of one nibble of each word, a run of inputs: uint16 -> `dtype`, exactly.

    As the last bits of a power of two whose last bit counts one, a nibble n is that power plus n.
    """
    power, bits = (1024, 0x6400) if dtype == jnp.float16 else (128, 0x4300)
    return _shift_and_mask(words, 4 * nibble, bits, dtype) - jnp.asarray(power + 8, dtype)


def _shift_and_mask(words: jax.Array, shift: int, bits: int, dtype: Any) -> jax.Array:
    """The `dtype` of bits ((words >> shift) & 15) | bits. words: uint16, laid out as a left operand.

    Two neighbours share a register: two instructions shift and mask both, where the compiler, which shifts each half
    alone, makes seven.
    """
    if interpreting():  # it knows no instructions
        return lax.bitcast_convert_type(((words >> shift) & 15) | jnp.uint16(bits), dtype)

    @plgpu.inline_mgpu(arg_types=(_LHS,), return_type=plgpu.ShapeDtypeStruct(words.shape, dtype, layout=_LHS))
    def both(_: Any, words: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.F16Type.get() if dtype == jnp.float16 else ir.BF16Type.get())
        # 0xEA: the truth table of (a & b) | c. What the shift brings in from the other half is masked out.
        instruction = f"lop3.b32 $0, $1, 0x000F000F, {bits << 16 | bits}, 0xEA;"
        registers = np.empty_like(words.registers)
        for index, register in np.ndenumerate(words.registers):
            shifted = arith.shrui(utils.bitcast(register, i32), utils.c(shift, i32))
            registers[index] = utils.bitcast(llvm.inline_asm(i32, [shifted], instruction, "=r,r"), pair)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)

    return both(words)  # pyright: ignore[reportCallIssue]  # the first parameter is supplied
