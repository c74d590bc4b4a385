"""Combine kernel of the mosaic backend: continues the fold of the rows that more than one CTA computed."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitk_jax.kernels.mosaic import access, schedule
from splitk_jax.kernels.mosaic.finish import finish
from splitk_jax.kernels.mosaic.schedule import Merge
from splitk_jax.kernels.mosaic.split import Launched, first_row
from splitk_jax.kernels.partials import SplitPartials, fold
from splitk_jax.plan import RUN_SPLITS, DecodePlan
from splitk_jax.policy import ceil_div
from splitk_jax.tiles import WARPGROUP

WARPGROUPS = 8
"""Warpgroups of a CTA, at most: each folds a run of splits while the others fold theirs."""

RESIDENT_WARPGROUPS = 16
"""Warpgroups that an SM holds at once; more in a launch take turns."""


def combine(
    launched: Launched,
    sinks: jax.Array | None,
    *,
    plan: DecodePlan,
) -> tuple[jax.Array, jax.Array]:  # [batch, q_len, num_q_heads, head_dim_v], f32[batch, q_len, num_q_heads]
    """Merges what the split kernel left in parts, one CTA a head, and returns the output and its log-sum-exp."""
    del sinks
    tile = plan.mosaic_tile
    out, lse, partials, scheduled = launched
    batch = out.shape[0]
    if plan.num_splits > 1 or not tile.direct:
        slots, head_blocks, num_splits = partials.o.shape[:3]
        resident = RESIDENT_WARPGROUPS * plan.launch_ctas // (tile.heads * head_blocks * slots)
        width = max(min(plan.runs, WARPGROUPS, resident), 1)
        layout = plgpu.Layout.WG_STRIDED((tile.lanes,), tile.lanes // WARPGROUP)

        def kernel(
            merge_gmem: Any,  # i32[slots, 3 + runs]
            o_gmem: Any,  # f32[slots, head_blocks, num_splits, cols, lanes]
            m_gmem: Any,  # f32[slots, head_blocks, num_splits, cols]
            l_gmem: Any,  # f32[slots, head_blocks, num_splits, cols]
            out_gmem: Any,  # [batch, num_q_heads, head_dim_v]
            lse_gmem: Any,  # f32[batch, head_blocks, cols]
            out_smem: Any,  # [lanes]
            lse_smem: Any,  # f32[lanes]
            o_smem: Any,  # f32[width, lanes]
            m_smem: Any,  # f32[width, lanes]
            l_smem: Any,  # f32[width, lanes]
            folded: Any,  # barrier
            taken: Any,  # barrier
        ) -> None:
            wg = lax.axis_index("wg")
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

            def load_run(first: Any) -> list[SplitPartials]:
                return [load(jnp.minimum(first + s, num_splits - 1)) for s in range(1, RUN_SPLITS)]

            def choose(which: Any, a: SplitPartials, b: SplitPartials) -> SplitPartials:
                return SplitPartials(*(jnp.where(which, x, y) for x, y in zip(a, b, strict=True)))

            def fold_two(a: SplitPartials, b: SplitPartials) -> SplitPartials:
                return fold(a, b, lambda x: x)

            # Loaded before the record says what was written, and looked at only after; of one row, all of it.
            first = jnp.minimum(wg * RUN_SPLITS, num_splits - 1)
            whole, prefix = load(first), load(0)
            rest = load_run(first) if batch == 1 else None
            item = Merge(*(merge_gmem[slot, c] for c in range(schedule.MERGE_RUNS)))
            runs = ceil_div(item.splits, RUN_SPLITS)

            def fold_run(i: Any, whole: SplitPartials, rest: list[SplitPartials] | None) -> None:
                run = i * width + wg
                first = run * RUN_SPLITS

                @pl.when((first >= item.prefix) & (first < item.splits))
                def _() -> None:
                    held = merge_gmem[slot, schedule.MERGE_RUNS + run]

                    def cut() -> SplitPartials:
                        acc = whole
                        for s, part in enumerate(load_run(first) if rest is None else rest, 1):
                            acc = choose((s >= held) & (first + s < item.splits), fold_two(acc, part), acc)
                        return acc

                    folded = lax.cond(held < RUN_SPLITS, cut, lambda: whole)
                    for smem, x in zip((o_smem, m_smem, l_smem), folded, strict=True):
                        smem[wg] = x

            def fold_runs(i: Any, acc: SplitPartials) -> SplitPartials:
                def step(w: Any, acc: SplitPartials) -> SplitPartials:
                    part = SplitPartials(*(access.load(x.at[w], layout) for x in (o_smem, m_smem, l_smem)))
                    return fold_two(acc, part)

                first = lax.div(item.prefix + (RUN_SPLITS - 1), jnp.int32(RUN_SPLITS)) - i * width
                return lax.fori_loop(jnp.clip(first, 0, width), jnp.clip(runs - i * width, 0, width), step, acc)

            def write(acc: SplitPartials) -> None:
                out, lse = finish(acc, lambda x: x)
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

            @pl.when(item.splits > 0)
            def _() -> None:
                fold_run(0, whole, rest)
                plgpu.barrier_arrive(folded)
                turns = ceil_div(runs, width)

                @pl.when(wg > 0)
                def _() -> None:
                    @pl.loop(1, turns)
                    def _(i: Any) -> None:
                        plgpu.barrier_wait(taken)
                        fold_run(i, load(jnp.minimum((i * width + wg) * RUN_SPLITS, num_splits - 1)), None)
                        plgpu.barrier_arrive(folded)

                @pl.when(wg == 0)
                def _() -> None:
                    def turn(i: Any, acc: SplitPartials) -> SplitPartials:
                        plgpu.barrier_arrive(taken)
                        fold_run(i, load(jnp.minimum(i * width * RUN_SPLITS, num_splits - 1)), None)
                        plgpu.barrier_arrive(folded)
                        plgpu.barrier_wait(folded)
                        return fold_runs(i, acc)

                    none = SplitPartials(*(jnp.full_like(x, e) for x, e in zip(prefix, (0, -jnp.inf, 0), strict=True)))
                    acc = choose(item.prefix > 0, prefix, none)
                    acc = SplitPartials(*(plgpu.layout_cast(x, layout) for x in acc))
                    plgpu.barrier_wait(folded)
                    write(lax.fori_loop(1, turns, turn, fold_runs(0, acc)))

        kernel.__name__ = f"splitk_combine_s{num_splits}"
        out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
        plgpu.kernel(
            kernel,
            out_type=(),
            scratch_types=[
                plgpu.SMEM((tile.lanes,), out.dtype),
                plgpu.SMEM((tile.lanes,), jnp.float32),
                *[plgpu.SMEM((width, tile.lanes), jnp.float32)] * 3,
                plgpu.Barrier(num_arrivals=width),
                plgpu.Barrier(num_arrivals=1),
            ],
            grid=(tile.heads, head_blocks, slots),
            grid_names=("head", "block", "slot"),
            num_threads=width,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        )(scheduled.merge, *partials, out_ref, lse_ref)
        # Without the barrier XLA lets a call whose result goes into a slice, as a scan's stacked output does, write to
        # that slice, although this one writes to its operand: the slice is then never written (JAX 0.11.2).
        out, lse = lax.optimization_barrier((jax.freeze(out_ref), jax.freeze(lse_ref)))
    head = np.arange(plan.num_q_heads)
    block = head // tile.heads
    lse = lse.reshape(batch, -1)[:, block * tile.cols + head - first_row(plan, block, xp=np)]
    return out[:, None], lse[:, None]
