"""Access to memory under one name in every JAX that is served: the signatures move from one to the next."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import arith

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
