"""Combine kernel of the mosaic backend: continues the fold of the rows that more than one CTA computed."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitk_jax.kernels.mosaic import access
from splitk_jax.kernels.mosaic.finish import finish
from splitk_jax.kernels.mosaic.schedule import Merge
from splitk_jax.kernels.mosaic.split import Launched, first_row
from splitk_jax.kernels.partials import SplitPartials, fold
from splitk_jax.plan import DecodePlan
from splitk_jax.tiles import WARPGROUP

AHEAD = 64
"""Floats of partials that a thread loads at once, one partial after another."""

GUESSED = 8
"""Partials that are loaded before it is known whether they are there, where a batch has several rows."""


def combine(
    launched: Launched,
    sinks: jax.Array | None,
    *,
    plan: DecodePlan,
) -> tuple[jax.Array, jax.Array]:  # [batch, q_len, num_q_heads, head_dim_v], f32[batch, q_len, num_q_heads]
    """Merges what the split kernel left in parts, one CTA a head, and returns the output and its log-sum-exp."""
    del sinks
    tile = plan.mosaic_tile
    out, lse, partials, schedule = launched
    batch = out.shape[0]
    if plan.num_splits > 1 or not tile.direct:
        slots, _, num_splits = partials.o.shape[:3]
        ahead = min(AHEAD * WARPGROUP // tile.lanes, num_splits)
        guessed = min(ahead if batch == 1 else GUESSED, num_splits)
        layout = plgpu.Layout.WG_STRIDED((tile.lanes,), tile.lanes // WARPGROUP)

        def kernel(
            merge_gmem: Any,  # i32[slots, 4]
            o_gmem: Any,  # f32[slots, head_blocks, num_splits, cols, lanes]
            m_gmem: Any,  # f32[slots, head_blocks, num_splits, cols]
            l_gmem: Any,  # f32[slots, head_blocks, num_splits, cols]
            out_gmem: Any,  # [batch, num_q_heads, head_dim_v]
            lse_gmem: Any,  # f32[batch, head_blocks, cols]
            out_smem: Any,  # [lanes]
            lse_smem: Any,  # f32[lanes]
        ) -> None:
            n, block, slot = (lax.axis_index(name) for name in ("head", "block", "slot"))
            head = block * tile.heads + n
            col = head - first_row(plan, block)

            def load(s: Any) -> SplitPartials:
                at = (slot, block, s, col)
                return SplitPartials(
                    o=access.load(o_gmem.at[at], layout),
                    m=jnp.full((tile.lanes,), m_gmem[at]),
                    l=jnp.full((tile.lanes,), l_gmem[at]),
                )

            def fold_live(acc: SplitPartials, part: SplitPartials, live: Any) -> SplitPartials:
                folded = fold(acc, part, lambda x: x)
                return SplitPartials(*(jnp.where(live, new, old) for new, old in zip(folded, acc, strict=True)))

            # Partial 0 is the prefix, partial `s` split `s`. What is loaded before the record says that it was written
            # is looked at only after.
            parts = [load(s) for s in range(guessed)]
            item = Merge(*(merge_gmem[slot, c] for c in range(len(Merge._fields))))

            @pl.when(item.prefix > 0)
            def _() -> None:
                acc = parts[0]
                for s, part in enumerate(parts[1:], 1):
                    acc = fold_live(acc, part, (s >= item.prefix) & (s < item.splits))
                first = jnp.maximum(item.prefix, guessed)

                def chunk(i: Any, acc: SplitPartials) -> SplitPartials:
                    at = first + i * ahead
                    parts = [load(jnp.minimum(at + j, item.splits - 1)) for j in range(ahead)]
                    for j, part in enumerate(parts):
                        acc = fold_live(acc, part, at + j < item.splits)
                    return acc

                chunks = lax.div(jnp.maximum(item.splits - first, 0) + (ahead - 1), jnp.int32(ahead))
                out, lse = finish(lax.fori_loop(0, chunks, chunk, acc), lambda x: x)
                lse_smem[...] = lse
                if plan.head_dim_v == tile.lanes:
                    out_gmem.at[item.row, head][...] = out.astype(out_gmem.dtype)
                    plgpu.commit_smem()
                else:
                    out_smem[...] = out.astype(out_gmem.dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, plan.head_dim_v)], out_gmem.at[item.row, head])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                lse_gmem[item.row, block, col] = lse_smem[0]

        kernel.__name__ = f"splitk_combine_s{num_splits}"
        out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
        plgpu.kernel(
            kernel,
            out_type=(),
            scratch_types=[plgpu.SMEM((tile.lanes,), out.dtype), plgpu.SMEM((tile.lanes,), jnp.float32)],
            grid=(tile.heads, partials.o.shape[1], slots),
            grid_names=("head", "block", "slot"),
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        )(schedule.merge, *partials, out_ref, lse_ref)
        # Without the barrier XLA lets a call whose result goes into a slice, as a scan's stacked output does, write to
        # that slice, although this one writes to its operand: the slice is then never written (JAX 0.11.2).
        out, lse = lax.optimization_barrier((jax.freeze(out_ref), jax.freeze(lse_ref)))
    head = np.arange(plan.num_q_heads)
    block = head // tile.heads
    lse = lse.reshape(batch, -1)[:, block * tile.cols + head - first_row(plan, block, xp=np)]
    return out[:, None], lse[:, None]
