"""Combine kernel of the mosaic backend: sums the partials of the rows that more than one CTA computed.

Scaling partials is exact (`fold.py`), so that the weight of every split is computed at once, a thread each, and what is
left is one sum in the tree's order: splits of a run, then runs.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitk_jax.kernels.mosaic import access, schedule
from splitk_jax.kernels.mosaic.fold import finish, fold_sink, weights
from splitk_jax.kernels.mosaic.schedule import Merge
from splitk_jax.kernels.mosaic.split import Launched, first_row
from splitk_jax.kernels.partials import SplitPartials
from splitk_jax.plan import DecodePlan
from splitk_jax.policy import ceil_div
from splitk_jax.tiles import WARPGROUP

FEW_CTAS = 2
"""CTAs an SM up to which they find one almost each."""

CHUNK = 8
"""Runs that one copy brings there, written or not."""

AHEAD_BYTES = 128 * 1024, 8 * 1024
"""Bytes of partials on their way to a CTA, at most: there, and where an SM is to hold many CTAs at once."""

NOT_WRITTEN = -1.0


def combine(
    launched: Launched,
    sinks: jax.Array | None,
    *,
    plan: DecodePlan,
) -> tuple[jax.Array, jax.Array]:  # [batch, q_len, num_q_heads, head_dim_v], f32[batch, q_len, num_q_heads]
    """Merges what the split kernel left in parts, one CTA a head, and returns the output and its log-sum-exp."""
    out, lse, partials, scheduled = launched
    q_len = scheduled.row_of.shape[1]
    group, plan = plan.group, plan.packed(q_len)
    tile = plan.mosaic_tile
    if plan.num_splits > 1 or not tile.direct:
        slots, head_blocks = partials.o.shape[:2]
        few = plan.num_q_heads * slots <= FEW_CTAS * plan.launch_ctas
        in_run = plan.run_splits
        # Runs of a copy; copies; and how many of them are on their way at once.
        runs = ceil_div(plan.runs, ceil_div(plan.runs, CHUNK)) if few else 1
        copies = ceil_div(plan.runs, runs)
        stages = min(max(AHEAD_BYTES[0 if few else 1] // (runs * in_run * tile.lanes * 4), 1), copies)
        layout = plgpu.Layout.WG_STRIDED((tile.lanes,), tile.lanes // WARPGROUP)
        by_thread = plgpu.Layout.TILED(
            plgpu.Tiling(((WARPGROUP,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
        # Of one row, most partials are written: the first copy is on its way before the record says so.
        guessed = few and slots == 1

        def kernel(*refs: Any) -> None:
            (
                merge_gmem,  # i32[slots, 3 + runs]
                written_gmem,  # i32[slots, scratch_weights]
                o_gmem,  # f32[slots, head_blocks, cols, scratch_splits, lanes]
                m_gmem,  # f32[slots, head_blocks, scratch_weights, cols]
                l_gmem,  # f32[slots, head_blocks, scratch_weights, cols]
                *sinks_gmem,  # f32[num_q_heads], where there are any
                out_gmem,  # [rows, heads, head_dim_v]; heads: num_q_heads, of all query tokens
                lse_gmem,  # f32[rows, head_blocks, cols]
                o_smem,  # f32[stages, splits of a copy, lanes]
                near_smem,  # f32[scratch_weights]
                far_smem,  # f32[scratch_weights]
                l_smem,  # f32[scratch_weights]
                out_smem,  # [lanes]
                lse_smem,  # f32[lanes]
                full,  # barriers[stages]
            ) = refs
            n, block, slot = (lax.axis_index(name) for name in ("head", "block", "slot"))
            head = block * tile.heads + n
            col = head - first_row(plan, block)

            def read_of(i: Any) -> tuple[Any, Any]:
                """The first split of a copy, and whether there is more of it than that."""
                if few:
                    return i * (runs * in_run), True
                entry = merge_gmem[slot, schedule.MERGE_READS + i]
                return lax.shift_right_logical(entry, jnp.int32(1)) * in_run, (entry & 1) > 0

            def fetch(i: Any) -> None:
                stage = lax.rem(i, jnp.int32(stages))
                first, more = read_of(i)

                def copy(rows: int) -> None:
                    plgpu.copy_gmem_to_smem(
                        o_gmem.at[slot, block, col, pl.ds(first, rows)],
                        o_smem.at[stage, pl.ds(0, rows)],
                        full.at[stage],
                    )

                if few or in_run == 1:
                    copy(runs * in_run)
                else:
                    pl.when(more)(lambda: copy(in_run))
                    pl.when(jnp.logical_not(more))(lambda: copy(1))

            def merge() -> None:
                item = Merge(*(merge_gmem[slot, c] for c in range(schedule.MERGE_READS)))
                count = ceil_div(item.splits, runs * in_run) if few else item.reads
                for i in range(int(guessed), stages):
                    pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))

                threads = [pl.ds(first, WARPGROUP) for first in range(0, plan.scratch_weights, WARPGROUP)]
                written = [access.load(written_gmem.at[slot, part], by_thread) != 0 for part in threads]
                m, l = (
                    [access.load(ref.at[slot, block, part, col], by_thread) for part in threads]
                    for ref in (m_gmem, l_gmem)
                )
                m = [jnp.where(is_written, x, -jnp.inf) for is_written, x in zip(written, m, strict=True)]
                m_all = jnp.max(functools.reduce(jnp.maximum, m))
                for i, part in enumerate(threads):
                    near, far = weights(m[i], jnp.full_like(m[i], m_all))
                    near_smem[part] = jnp.where(written[i], near, NOT_WRITTEN)
                    far_smem[part] = far
                    l_smem[part] = jnp.where(written[i], l[i] * near * far, 0.0)
                plgpu.commit_smem()

                def sum_copy(i: Any, total: tuple[Any, Any]) -> tuple[Any, Any]:
                    stage = lax.rem(i, jnp.int32(stages))
                    first, more = read_of(i)
                    plgpu.barrier_wait(full.at[stage])

                    def term(s: int) -> tuple[Any, Any]:
                        near, far = near_smem[first + s], far_smem[first + s]
                        o = access.load(o_smem.at[stage, s], layout)
                        o = o * jnp.full((tile.lanes,), near) * jnp.full((tile.lanes,), far)
                        return jnp.where(near != NOT_WRITTEN, o, 0.0), l_smem[first + s]

                    def add(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
                        return a[0] + b[0], a[1] + b[1]

                    for r in range(runs):
                        run = term(r * in_run)

                        def rest(run: tuple[Any, Any] = run, r: int = r) -> tuple[Any, Any]:
                            return functools.reduce(add, map(term, range(r * in_run + 1, (r + 1) * in_run)), run)

                        total = add(total, rest() if few else lax.cond(more, rest, lambda run=run: run))
                    if copies > stages:

                        @pl.when(i + stages < count)
                        def _() -> None:
                            plgpu.commit_smem()  # every thread has read the stage
                            fetch(i + stages)

                    return total

                total = (plgpu.layout_cast(jnp.zeros((tile.lanes,), jnp.float32), layout), jnp.float32(0))
                total = lax.fori_loop(0, count, sum_copy, total) if copies > 1 else sum_copy(jnp.int32(0), total)
                o, l = total
                across = [jnp.full((tile.lanes,), x) for x in (m_all, l)]
                acc = SplitPartials(o, *across)
                if sinks is not None:
                    kv_head, within = lax.div(head, jnp.int32(plan.group)), lax.rem(head, jnp.int32(plan.group))
                    of_token = kv_head * group + lax.rem(within, jnp.int32(group))
                    acc = fold_sink(acc, jnp.full((tile.lanes,), sinks_gmem[0][of_token]), lambda x: x)
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

            if guessed:
                fetch(jnp.int32(0))
            used = merge_gmem[slot, schedule.MERGE_SPLITS] > 0
            pl.when(used)(merge)
            if guessed:  # no CTA leaves before what is written to its memory
                pl.when(jnp.logical_not(used))(lambda: plgpu.barrier_wait(full.at[0]))

        kernel.__name__ = f"splitk_combine_s{plan.num_splits}"
        out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
        plgpu.kernel(
            kernel,
            out_type=(),
            scratch_types=[
                plgpu.SMEM((stages, runs * in_run, tile.lanes), jnp.float32),
                *[plgpu.SMEM((plan.scratch_weights,), jnp.float32)] * 3,
                plgpu.SMEM((tile.lanes,), out.dtype),
                plgpu.SMEM((tile.lanes,), jnp.float32),
                plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            ],
            grid=(tile.heads, head_blocks, slots),
            grid_names=("head", "block", "slot"),
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        )(scheduled.merge, scheduled.written, *partials, *([] if sinks is None else [sinks]), out_ref, lse_ref)
        # Without the barrier XLA lets a call whose result goes into a slice, as a scan's stacked output does, write to
        # that slice, although this one writes to its operand: the slice is then never written (JAX 0.11.2).
        out, lse = lax.optimization_barrier((jax.freeze(out_ref), jax.freeze(lse_ref)))
    head = np.arange(plan.num_q_heads)
    block = head // tile.heads
    lse = lse.reshape(len(lse), -1)[:, block * tile.cols + head - first_row(plan, block, xp=np)]
    if q_len == 1:
        return out[:, None], lse[:, None]
    of_tokens = functools.partial(_of_tokens, row_of=scheduled.row_of, num_kv_heads=plan.num_kv_heads, group=group)
    return of_tokens(out), of_tokens(lse)


def _of_tokens(x: jax.Array, *, row_of: jax.Array, num_kv_heads: int, group: int) -> jax.Array:
    """[rows, heads, ...] -> [batch, q_len, num_q_heads, ...]: of each query token, what its row has of it."""
    batch, q_len = row_of.shape
    x = x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])[:, :, : q_len * group]
    x = x.reshape(x.shape[0], num_kv_heads, q_len, group, *x.shape[3:])
    x = x[row_of, :, jnp.arange(q_len)[None, :]]
    return x.reshape(batch, q_len, -1, *x.shape[4:])
