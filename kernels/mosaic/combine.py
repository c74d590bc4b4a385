"""Combine kernel of the mosaic backend: continues the fold of the rows that more than one CTA computed."""

import functools
from collections.abc import Callable
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
from splitk_jax.kernels.partials import SplitPartials, choose, fold
from splitk_jax.plan import RUN_SPLITS, DecodePlan
from splitk_jax.policy import ceil_div
from splitk_jax.tiles import WARPGROUP

AHEAD = 64
"""Floats of partials that a thread has in flight where a batch has one row."""

AHEAD_OF_MANY = 16
"""The same where it has several: in few registers, so that an SM holds the CTAs of many rows at once."""


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
        slots, _, num_splits = partials.o.shape[:3]
        # Runs of a chunk, whose partials are in flight together.
        ahead = AHEAD if batch == 1 else AHEAD_OF_MANY
        runs = min(max(ahead * WARPGROUP // tile.lanes // RUN_SPLITS, 1), plan.runs)
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

            def fold_two(a: SplitPartials, b: SplitPartials) -> SplitPartials:
                return fold(a, b, lambda x: x)

            def load_chunk(first: Any, written: Callable[[int], Any]) -> list[SplitPartials]:
                """The partials of the splits from `first` on; of one that was not written, the first's in its place."""
                count = min(runs * RUN_SPLITS, num_splits)
                return [load(jnp.where(written(s), first + s, first)) for s in range(count)]

            def all_written(s: int) -> bool:
                del s
                return True

            # Loaded before the record says what was written, and looked at only after: of one row, a whole chunk.
            guessed = load_chunk(0, all_written) if batch == 1 else [load(0)]
            item = Merge(*(merge_gmem[slot, c] for c in range(schedule.MERGE_RUNS)))

            def fold_chunk(i: Any, acc: SplitPartials, parts: list[SplitPartials] | None = None) -> SplitPartials:
                first = i * runs * RUN_SPLITS
                # Past the tree's last run there is no record, and no split either.
                run = [jnp.minimum(i * runs + r, plan.runs - 1) for r in range(runs)]
                held = [merge_gmem[slot, schedule.MERGE_RUNS + r] for r in run]

                def written(s: int) -> Any:
                    r, place = divmod(s, RUN_SPLITS)
                    return (first + s < item.splits) & (place == 0 or place >= held[r])

                parts = load_chunk(first, written) if parts is None else parts
                for at in range(0, len(parts), RUN_SPLITS):
                    whole, *rest = parts[at : at + RUN_SPLITS]

                    def fold_run(whole: SplitPartials = whole, rest: Any = rest, at: int = at) -> SplitPartials:
                        run = whole
                        for s, part in enumerate(rest, at + 1):
                            run = choose(written(s), fold_two(run, part), run)
                        return run

                    live = (first + at >= item.prefix) & (first + at < item.splits)
                    if batch == 1:  # most runs are cut, and what does not branch overlaps
                        acc = choose(live, fold_two(acc, fold_run()), acc)
                    else:
                        cut = held[at // RUN_SPLITS] < RUN_SPLITS
                        fold_it = functools.partial(lax.cond, cut, fold_run, lambda whole=whole: whole)
                        acc = lax.cond(live, lambda acc=acc, it=fold_it: fold_two(acc, it()), lambda acc=acc: acc)
                return acc

            @pl.when(item.splits > 0)
            def _() -> None:
                none = SplitPartials(*(jnp.full_like(x, e) for x, e in zip(guessed[0], (0, -jnp.inf, 0), strict=True)))
                acc = choose(item.prefix > 0, guessed[0], none)
                first = lax.div(item.prefix, jnp.int32(runs * RUN_SPLITS))
                stop = ceil_div(item.splits, runs * RUN_SPLITS)
                if batch == 1:
                    acc, first = fold_chunk(0, acc, guessed), jnp.maximum(first, 1)
                if batch > 1 or plan.runs > runs:
                    acc = lax.fori_loop(first, stop, fold_chunk, acc)
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

        kernel.__name__ = f"splitk_combine_s{num_splits}"
        out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
        plgpu.kernel(
            kernel,
            out_type=(),
            scratch_types=[plgpu.SMEM((tile.lanes,), out.dtype), plgpu.SMEM((tile.lanes,), jnp.float32)],
            grid=(tile.heads, partials.o.shape[1], slots),
            grid_names=("head", "block", "slot"),
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        )(scheduled.merge, *partials, out_ref, lse_ref)
        # Without the barrier XLA lets a call whose result goes into a slice, as a scan's stacked output does, write to
        # that slice, although this one writes to its operand: the slice is then never written (JAX 0.11.2).
        out, lse = lax.optimization_barrier((jax.freeze(out_ref), jax.freeze(lse_ref)))
    head = np.arange(plan.num_q_heads)
    block = head // tile.heads
    lse = lse.reshape(batch, -1)[:, block * tile.cols + head - first_row(plan, block, xp=np)]
    return out[:, None], lse[:, None]
