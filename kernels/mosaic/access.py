"""Access to memory under one name in every JAX that is served: the signatures move from one to the next."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from splitk_jax.tiles import ROWS, WARPGROUP

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


FOURS = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 16), (16, 16), (8, 16), (4,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
"""Rows as in `WGMMA`; of each 16 columns a thread has four next to each other."""


def operand_apart(x: jax.Array) -> jax.Array:
    """8-bit values in `FOURS` as a float16 operand of `wgmma`, whose columns are in the order of `pairs_apart`."""
    x = to_half(x, FOURS)
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(FOURS,), return_type=out)
    def relabel(ctx: Any, x: Any) -> Any:
        del ctx
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(x.shape), object)
        for half in range(2):
            for at, fours in np.ndenumerate(x.registers):
                registers[at[0], 2 * at[1] + half, *at[2:]] = _half_of(fours, half)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return relabel(x)


def pairs_apart(x: jax.Array, layout: Any) -> jax.Array:
    """Of each 16 columns, of which four threads have four each: everyone's first two, then everyone's last two.

    Args:
      x: 16-bit, [n, columns].
      layout: of whole rows of x a warp, four columns a thread.
    """
    columns = x.shape[1]
    rows = 32 * 4 // columns
    apart = plgpu.Layout.TILED(
        plgpu.Tiling(((4 * rows, columns), (rows, columns), (16,), (8,), (2,))),
        warp_dims=(-7,),
        lane_dims=(-5, -4, -2),
        vector_dim=-1,
    )

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=apart))
    def relabel(ctx: Any, x: Any) -> Any:
        del ctx
        registers = np.empty(apart.to_mgpu().registers_shape(x.shape), object)
        for half in range(2):
            for (row, *_), fours in np.ndenumerate(x.registers):
                registers[row, 0, 0, 0, 0, 0, half, 0, 0] = _half_of(fours, half)
        return mgpu.FragmentedArray(_registers=registers, _layout=apart.to_mgpu(), _is_signed=None)

    return relabel(x)


def _half_of(fours: Any, half: int) -> Any:
    return vector.shuffle(fours, fours, [2 * half, 2 * half + 1])


def _int8_pairs(low: str, high: str) -> str:
    """PTX: of four int8, two pairs as float16 each; `low` and `high` select them from the four and 0x64.

    Behind the byte 0x64 a byte `u` is the float16 `1024 + u`; 1152 is 1024, and the 128 by which the flipped sign bit
    is off.
    """
    return f"""
        {{
        .reg .b32 flipped, low, high, bias;
        xor.b32 flipped, $2, 0x80808080;
        mov.b32 bias, 0x64806480;
        prmt.b32 low, flipped, 0x64, {low};
        prmt.b32 high, flipped, 0x64, {high};
        sub.f16x2 $0, low, bias;
        sub.f16x2 $1, high, bias;
        }}
    """


def _two(ptx: str, word: Any) -> list[Any]:
    """The two words that PTX makes of one."""
    i32 = ir.IntegerType.get_signless(32)
    both: Any = llvm.inline_asm(llvm.StructType.get_literal([i32, i32]), [word], ptx, "=r,=r,r")
    return [llvm.extractvalue(i32, both, [i]) for i in range(2)]


_PAIRS_TO_HALF = {
    "float8_e4m3fn": """
        {
        .reg .b32 apart;
        .reg .b16 even, odd;
        prmt.b32 apart, $2, 0, 0x3120;
        mov.b32 {even, odd}, apart;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
        }
    """,
    # A float16 begins with the byte that is its e5m2.
    "float8_e5m2": """
        prmt.b32 $0, $2, 0, 0x2404;
        prmt.b32 $1, $2, 0, 0x3414;
    """,
    "int8": _int8_pairs("0x4240", "0x4341"),
}
"""PTX: of the bytes (even, odd) of one token and of the next, the even ones and the odd ones as two float16 each."""

LANES_IN_ORDER = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (2, 2), (2, 1))), warp_dims=(-8,), lane_dims=(-6, -5), vector_dim=-2
)
"""Of an accumulator, what a thread has of `WGMMA`, in pairs of rows."""


def load_transposed(ref: Any, transforms: Any, rows: int) -> jax.Array:
    """Loads quantised values as the transposed left operand of `wgmma`: f16[rows, tokens].

    A 16-bit transposing load moves pairs of lanes. Of each 16 lanes the even ones come first, then the odd ones;
    `lanes_in_order` undoes it to the product.

    Args:
      ref: [tokens, lanes] of shared memory.
      transforms: a tiling of eight rows and as many lanes as the swizzle behind it has bytes.
      rows: lanes in whole rows of `wgmma`; those beyond what there is are copies of others.
    """
    tokens, lanes = ref.shape
    out = plgpu.ShapeDtypeStruct((rows, tokens), jnp.float16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), return_type=out)
    def load(ctx: Any, tile: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        whole = ir.MemRefType(tile.type)
        (by_rows, by_lanes, *_), _ = whole.get_strides_and_offset()
        *_, width = whole.shape

        def const(x: int) -> Any:
            return arith.constant(i32, ir.IntegerAttr.get(i32, x))

        def times(x: Any, n: int) -> Any:
            return arith.muli(x, const(n))

        thread = arith.remui(mgpu.utils.thread_idx(), const(WARPGROUP))
        warp, lane = arith.divui(thread, const(32)), arith.remui(thread, const(32))
        matrix, row = arith.divui(lane, const(8)), arith.remui(lane, const(8))
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(tile))
        base = arith.addi(base, arith.addi(times(matrix, by_rows), times(row, width)))
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((rows, tokens)), object)
        half2 = ir.VectorType.get((2,), ir.F16Type.get())
        for m in range(rows // ROWS):
            first = arith.minui(arith.addi(times(warp, 16), const(m * ROWS)), const(lanes - 16))
            at = arith.addi(base, times(arith.divui(first, const(width)), by_lanes))
            at = arith.addi(at, arith.remui(first, const(width)))
            # The swizzle of 2**n times 16 bytes: n bits of the row of 128 bytes, on those of the 16 bytes in it.
            bits = arith.andi(arith.shrui(at, const(3)), const(width - 16))
            at = arith.xori(at, bits)
            for eights in range(0, tokens // 8, 4):
                four: Any = llvm.inline_asm(
                    llvm.StructType.get_literal([i32] * 4),
                    [arith.addi(at, const(eights * by_rows))],
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
                    "=r,=r,=r,=r,r,~{memory}",
                    has_side_effects=True,
                )
                for i in range(4):
                    halves = _two(_PAIRS_TO_HALF[str(ref.dtype)], llvm.extractvalue(i32, four, [i]))
                    for odd, pair in enumerate(halves):
                        registers[m, eights + i, 0, 0, odd, 0, 0, 0, 0] = llvm.bitcast(half2, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)


def lanes_in_order(x: jax.Array) -> jax.Array:
    """The rows of a product with `load_transposed` in their order: no register moves to another thread."""
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LANES_IN_ORDER)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=out)
    def reorder(ctx: Any, x: Any) -> Any:
        del ctx
        layout = LANES_IN_ORDER.to_mgpu()
        registers = np.empty(layout.registers_shape(x.shape), object)
        for m, n in np.ndindex(*registers.shape[:2]):
            halves = [x.registers[m, n, 0, 0, odd, 0, 0, 0, 0] for odd in range(2)]
            for col in range(2):
                pair = llvm.mlir_undef(halves[0].type)
                for odd in range(2):
                    pair = vector.insert(
                        vector.extract(halves[odd], [], [col]), pair, dynamic_position=[], static_position=[odd]
                    )
                registers[m, n, 0, 0, 0, 0, 0, col, 0, 0] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return reorder(x)


def _int8_to_half(x: jax.Array, layout: Any) -> jax.Array:
    """Two at a time, which Mosaic casts one by one."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float16, layout=layout))
    def convert(ctx: Any, x: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        ptx = _int8_pairs("0x4140", "0x4342")
        registers = np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            (count,) = ir.VectorType(register.type).shape
            fours = vector.bitcast(ir.VectorType.get((count // 4,), i32), register)
            out = llvm.mlir_undef(ir.VectorType.get((count // 2,), i32))
            for i in range(count // 4):
                for j, pair in enumerate(_two(ptx, vector.extract(fours, [], [i]))):
                    out = llvm.insertelement(out, pair, arith.constant(i32, ir.IntegerAttr.get(i32, 2 * i + j)))
            registers[at] = vector.bitcast(ir.VectorType.get((count,), ir.F16Type.get()), out)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return convert(x)
