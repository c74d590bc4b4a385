"""Merge of attention states on the mosaic backend: one pass over them, a warp a row."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from splitk_jax.kernels.mosaic import access
from splitk_jax.kernels.partials import LOG2E

ROWS = 4
"""Of one CTA, a warp each."""

LANES = 128, 64
"""Lanes that a warp reads at once: the first that divides head_dim."""


def serves(shape: tuple[int, ...]) -> bool:
    """Whether states of [..., heads, head_dim] can be merged here: by what a model fixes, so that no batch moves it."""
    return len(shape) > 1 and shape[-2] % ROWS == 0 and shape[-1] % LANES[-1] == 0 and 0 not in shape


def merge(outs: list[jax.Array], lses: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Folds states in their order, in float32.

    Args:
      outs: [..., head_dim] each.
      lses: f32[...] each.

    Returns:
      out, lse: as one of them.
    """
    shape, dtype, count = outs[0].shape, outs[0].dtype, len(outs)
    head_dim = shape[-1]
    rows = outs[0].size // head_dim
    lanes = next(n for n in LANES if head_dim % n == 0)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((ROWS, lanes), (lanes // 32,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    per_row = layout.reduce(1)

    def kernel(*refs: Any) -> None:
        outs_gmem, lses_gmem = refs[:count], refs[count : 2 * count]
        out_gmem, lse_gmem = refs[2 * count :]
        at = pl.ds(lax.axis_index("rows") * ROWS, ROWS)

        def across(x: jax.Array) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, (ROWS, head_dim), [0]), layout)

        states = [access.load(ref.at[at], layout) for ref in outs_gmem]
        logs = [access.load(ref.at[at], per_row) for ref in lses_gmem]
        largest = logs[0]
        for log in logs[1:]:
            largest = jnp.maximum(largest, log)
        total, merged = jnp.zeros_like(largest), jnp.zeros_like(states[0].astype(jnp.float32))
        for state, log in zip(states, logs, strict=True):
            empty = log == -jnp.inf
            # Equal infinities weigh 1 apart from -inf, whose state may hold anything.
            weight = jnp.where(log == largest, 1.0, jnp.exp2((log - largest) * LOG2E))
            weight = jnp.where(empty, 0.0, weight)
            total += weight
            merged += jnp.where(across(empty), 0.0, across(weight) * state.astype(jnp.float32))
        none = total == 0
        out = jnp.where(across(none), 0.0, merged / across(jnp.where(none, 1.0, total)))
        infinite = ((largest == jnp.inf) | (largest == -jnp.inf)) & (total == total)
        access.store(out_gmem.at[at], out.astype(dtype))
        access.store(lse_gmem.at[at], jnp.where(infinite, largest, largest + jnp.log(total)))

    kernel.__name__ = f"splitk_merge_n{count}"
    out, lse = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((rows, head_dim), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        grid=(rows // ROWS,),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*(x.reshape(rows, head_dim) for x in outs), *(x.reshape(rows) for x in lses))
    return out.reshape(shape), lse.reshape(shape[:-1])
