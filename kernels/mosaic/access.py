"""Access to memory under one name in every JAX that is served: the signatures move from one to the next."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

plgpu: Any = mosaic_gpu


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads a whole ref in a register layout, whichever banks or cache lines that meets: a few words."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Stores to a whole ref from whatever layout the value has: a few words."""
    if hasattr(plgpu, "store"):  # JAX 0.12; before, an assignment asks for no fast path
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def copy_in(src: Any, dst: Any, barrier: Any, *, wanted: Any) -> None:
    """Starts a TMA copy from global to shared memory; where it is not wanted, only arrives at the barrier."""
    plgpu.copy_gmem_to_smem(src, dst, barrier, predicate=wanted)


def reduce_rows(op: str, x: jax.Array, scratch: Any, layout: Any, reduced: Any) -> jax.Array:
    """Reduces an array of one warpgroup over its rows, through memory of its own: `jnp.max` has one for all warpgroups.

    Args:
      op: "max" or "add".
      x: f32[rows, cols], in `layout`.
      scratch: f32 ref to shared memory, `tiles.REDUCTION_BYTES` long.
      layout: the layout of x.
      reduced: `layout` without its rows.

    Returns:
      f32[cols], in `reduced`.
    """

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=reduced),
    )
    def reduce(ctx: Any, x: Any, scratch: Any) -> Any:
        del ctx
        # Of "add", the order of the sum would follow the number of columns.
        return x.reduce(arith.addf if op == "add" else op, 0, scratch)

    return reduce(x, scratch)


def load_tile(ref: Any, layout: Any) -> jax.Array:
    """Loads a tile of shared memory in a register layout that meets no bank twice."""
    return plgpu.load(ref, layout=layout)


def to_half(x: jax.Array, layout: Any) -> jax.Array:
    """8-bit values as float16, which has each of them exactly.

    Args:
      x: float8_e4m3fn, float8_e5m2 or int8.
      layout: that of x; of int8, one whose threads have four values next to each other, or more.
    """
    return x.astype(jnp.float16) if jnp.issubdtype(x.dtype, jnp.floating) else _int8_to_half(x, layout)


def half_operand(x: jax.Array) -> jax.Array:
    """8-bit values in `WGMMA_UPCAST_2X` as a float16 operand of `wgmma`, by exchanges between neighbouring threads."""
    wide, operand = plgpu.Layout.WGMMA_UPCAST_2X, plgpu.Layout.WGMMA
    if jnp.issubdtype(x.dtype, jnp.floating):  # of 8 bits, half as much is exchanged
        return to_half(plgpu.layout_cast(x, operand), operand)
    return plgpu.layout_cast(to_half(x, wide), operand)


def _int8_to_half(x: jax.Array, layout: Any) -> jax.Array:
    """Behind the byte 0x64 a byte `u` is the float16 `1024 + u`: two at a time, which Mosaic casts one by one."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float16, layout=layout))
    def convert(ctx: Any, x: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)

        def pairs(four: Any) -> list[Any]:
            # 1152 is 1024, and the 128 by which the flipped sign bit is off.
            ptx = """
            {
            .reg .b32 flipped, low, high, bias;
            xor.b32 flipped, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 low, flipped, 0x64, 0x4140;
            prmt.b32 high, flipped, 0x64, 0x4342;
            sub.f16x2 $0, low, bias;
            sub.f16x2 $1, high, bias;
            }
            """
            both: Any = llvm.inline_asm(llvm.StructType.get_literal([i32, i32]), [four], ptx, "=r,=r,r")
            return [llvm.extractvalue(i32, both, [i]) for i in range(2)]

        registers = np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            (count,) = ir.VectorType(register.type).shape
            fours = vector.bitcast(ir.VectorType.get((count // 4,), i32), register)
            out = llvm.mlir_undef(ir.VectorType.get((count // 2,), i32))
            for i in range(count // 4):
                for j, pair in enumerate(pairs(vector.extract(fours, [], [i]))):
                    out = llvm.insertelement(out, pair, arith.constant(i32, ir.IntegerAttr.get(i32, 2 * i + j)))
            registers[at] = vector.bitcast(ir.VectorType.get((count,), ir.F16Type.get()), out)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return convert(x)
