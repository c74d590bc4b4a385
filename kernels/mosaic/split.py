"""Split kernel of the mosaic backend: persistent CTAs stream pages by TMA and multiply them on Hopper's tensor cores.

One warpgroup streams pages through a ring of stages, one or two compute, each for heads of its own. Operands are
swapped with respect to the paper: tokens are the M of `wgmma` and the query heads of one KV head its N, so that 8 heads
cost 8 columns and not 64 rows, and a whole accumulator is a few registers a thread.

A CTA computes a contiguous range of the batch's splits for its blocks of heads (`schedule.py`). Of a row that begins in
its range it folds the splits as it goes, and writes the output when it holds them all, or one partial, the fold so far;
of a row that began in another CTA's range it writes a partial for each run of splits, and for each split of a run that
began there too. The combine goes on from there.

Online softmax: Milakov and Gimelshein, arXiv:1805.02867; the split over KV: Dao et al., "Flash-Decoding" (2023).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitk_jax.kernels.mosaic import access, schedule
from splitk_jax.kernels.mosaic.fold import finish, fold, fold_sink, to_whole
from splitk_jax.kernels.mosaic.schedule import Row, Schedule, Work
from splitk_jax.kernels.partials import LOG2E, NO_CAP, SplitPartials, choose, rescale
from splitk_jax.plan import RUN_SPLITS, DecodePlan, split_range
from splitk_jax.tiles import REDUCTION_BYTES, ROWS, SCALE_HEADS, WARPGROUP

Layout = plgpu.Layout
PER_HEAD = Layout.WGMMA.reduce(0)
LIFT = 14.0
"""The power of two that the largest weight of a step is near to, where weights are float16; 2**15.5 would overflow."""

REGISTERS = 56, 224
"""Registers of a thread that loads, and of one that computes on quantised pages, where two warpgroups do."""

LEAST_SIZE = 2.0**-126
"""The size of scales that are not there."""

EXPONENT = 0xFF << 23
"""The bits of a float32's exponent."""

NONE = -WARPGROUP
"""The first place of the block table whose id is held, where none is."""

# The accumulator's layout without its pairs of columns, which a transposed store cannot write together.
UNPAIRED = Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)


class Launched(NamedTuple):
    """What the split kernel leaves.

    Attributes:
      out: [rows, heads, head_dim_v]. Written where one CTA computed all splits of a row.
      lse: f32[rows, head_blocks, cols]. Natural logarithm; of the same rows.
      partials: of the other rows; o: f32[slots, head_blocks, cols, scratch_splits, lanes], m and l: f32[slots,
        head_blocks, scratch_weights, cols].
      schedule: who computed what.
    """

    out: jax.Array
    lse: jax.Array
    partials: SplitPartials
    schedule: Schedule


def first_row(plan: DecodePlan, block: Any, *, xp: Any = jnp) -> Any:
    """The query head in column 0 of a block's products: its first, or earlier where whole octets end beyond q."""
    tile = plan.mosaic_tile
    return xp.minimum(block * tile.heads, max(plan.num_q_heads - tile.cols, 0))


def _bit(j: int) -> np.int32:
    return np.uint32(1 << j).astype(np.int32)


def rows_layout(lanes: int, vector: int) -> Any:
    """Of a swizzled tile of so many lanes: a warp covers whole rows, so that its accesses meet no bank conflict."""
    rows = 32 * vector // lanes
    return Layout.TILED(
        plgpu.Tiling(((4 * rows, lanes), (rows, lanes), (vector,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def pack(x: jax.Array, packed: DecodePlan) -> jax.Array:
    """[batch, q_len, num_q_heads, n] -> [batch, heads, n]: the heads of all tokens that share a KV head together."""
    batch, q_len, _, n = x.shape
    if q_len > 1:
        x = x.reshape(batch, q_len, packed.num_kv_heads, -1, n).swapaxes(1, 2)
        x = x.reshape(batch, packed.num_kv_heads, -1, n)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, packed.group - x.shape[2]), (0, 0)))
    return x.reshape(batch, packed.num_q_heads, n)


def split(
    q: jax.Array,  # [batch, q_len, num_q_heads, head_dim]
    k_pages: jax.Array,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: jax.Array,  # [num_pages, page_size, num_kv_heads, head_dim_v]
    block_tables: jax.Array,  # i32[batch, max_pages_per_seq]
    seq_lens: jax.Array,  # i32[batch]
    sm_scale: jax.Array,  # f32[]
    sinks: jax.Array | None,  # f32[num_q_heads]
    k_scale: jax.Array | None = None,  # f32[], f32[num_kv_heads] or f32[num_pages, page_size, num_kv_heads]
    v_scale: jax.Array | None = None,  # as k_scale
    *,
    plan: DecodePlan,
    window: int | None,
    softcap: float | None,
) -> Launched:
    """Computes every split, folds what one CTA holds, and writes the outputs of the rows that are whole."""
    batch, q_len = q.shape[:2]
    of_tokens = {name: x for name, x in (("k", k_scale), ("v", v_scale)) if x is not None and x.ndim == 3}
    group, plan = plan.group, plan.packed(q_len).with_token_scales(len(of_tokens))
    tile, rows = plan.mosaic_tile, batch * q_len
    num_pages = k_pages.shape[0]
    step_kv, stages, cols, rows_v, dtype = plan.step_kv, plan.stages, tile.cols, tile.rows_v, q.dtype
    # What is multiplied: float16 has every 8-bit value, and of bfloat16 queries every one by a power of two of its row.
    half = jnp.float16 if tile.quantised else dtype
    scaled = half != dtype
    # float16 has no weight below 2**-24: largest weights of about 2**14 leave as much room below them as they can.
    lift = LIFT if half == jnp.float16 else 0.0
    kv_heads, warpgroups, head_blocks = tile.kv_heads, tile.warpgroups, plan.num_kv_heads * tile.blocks
    assert stages is not None  # a plan of this backend has them
    sched = schedule.make_schedule(seq_lens, block_tables, plan=plan, window=window, q_len=q_len)
    slots = sched.merge.shape[0]
    q = pack(q, plan)
    padding = max(cols - plan.num_q_heads, 0)
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0))) if padding else q
    if sinks is not None:
        sinks = pack(jnp.broadcast_to(sinks[None, None, :, None], (1, q_len, sinks.shape[0], 1)), plan)
        sinks = jnp.pad(sinks[0, :, 0], (0, padding))
    extra = {
        name: x if x.ndim else x.reshape(1)
        for name, x in (("sinks", sinks), ("k_scale", k_scale), ("v_scale", v_scale))
        if x is not None and x.ndim < 3
    }
    block_tables = jnp.pad(block_tables, ((0, 0), (0, max(WARPGROUP - block_tables.shape[1], 0))))
    ids_layout = Layout.WG_STRIDED((WARPGROUP,), 1)
    chunk = tile.swizzle // 2
    q_layout = rows_layout(chunk, chunk // 16)
    tiled = (plgpu.TilingTransform((8, chunk)), plgpu.SwizzleTransform(tile.swizzle))
    # Of a step: its keys and values as they are loaded, the KV heads of a CTA side by side where they are quantised.
    loaded = [
        plgpu.SMEM((stages, kv_heads, step_kv, lanes), pool.dtype, transforms=tiled)
        for pool, lanes in ((k_pages, plan.head_dim), (v_pages, rows_v))
    ]
    key_copies, value_copies = kv_heads * tile.copies, kv_heads * step_kv // tile.copy_rows_v
    if tile.quantised:
        k_pages, v_pages = (x.reshape(*x.shape[:2], -1) for x in (k_pages, v_pages))
        byte_tiled = (plgpu.TilingTransform((8, tile.kv_lanes)), plgpu.SwizzleTransform(tile.kv_lanes))
        loaded = [
            plgpu.SMEM((stages, step_kv, kv_heads * lanes), pool.dtype, transforms=byte_tiled)
            for pool, lanes in ((k_pages, plan.head_dim), (v_pages, plan.head_dim_v))
        ]
        key_copies = value_copies = tile.copies
    # Whether queries lie in the order of lanes in which threads hold the bytes of keys, who then exchange none.
    apart = tile.quantised and chunk // 16 == 4
    moves_registers = tile.quantised and warpgroups == 2
    more = {"unit": plgpu.SMEM((warpgroups, cols), jnp.float32)} if scaled else {}
    more |= {name: plgpu.SMEM((stages, step_kv, SCALE_HEADS), jnp.float32) for name in of_tokens}

    def kernel(*refs: Any) -> None:
        (
            q_gmem,  # [batch, heads, head_dim]; heads: num_q_heads, of all query tokens
            k_gmem,  # [num_pages, page_size, num_kv_heads, head_dim]; quantised, the last two in one
            v_gmem,  # [num_pages, page_size, num_kv_heads, head_dim_v]; as k_gmem
            pages_gmem,  # i32[batch, max_pages_per_seq]
            scale_gmem,  # f32[1]
            rows_gmem,  # i32[rows, 10]
            work_gmem,  # i32[teams, 15 + copies]
            *extra_gmem,  # what there is: sinks f32[heads]; k_scale, v_scale f32[1 or num_kv_heads], or of tokens
            out_gmem,  # [rows, heads, head_dim_v]
            lse_gmem,  # f32[rows, head_blocks, cols]
            o_gmem,  # f32[slots, head_blocks, cols, scratch_splits, lanes]
            m_gmem,  # f32[slots, head_blocks, scratch_weights, cols]
            l_gmem,  # f32[slots, head_blocks, scratch_weights, cols]
            k_smem,  # [stages, kv_heads, step_kv, head_dim]; quantised, [stages, step_kv, kv_heads * head_dim]
            v_smem,  # [stages, kv_heads, step_kv, rows_v]; quantised, [stages, step_kv, kv_heads * head_dim_v]
            q_smem,  # [warpgroups, cols, head_dim]
            p_smem,  # [warpgroups, cols, step_kv]
            out_smem,  # [warpgroups, cols, rows_v]
            reduce_smem,  # f32[warpgroups, ...]
            bad_smem,  # i32[stages]
            ids_smem,  # i32[WARPGROUP]
            k_full,  # barriers[stages]
            v_full,
            k_free,
            v_free,
        ) = refs[: len(refs) - len(more)]
        # Of queries, where they are scaled f32[warpgroups, cols]; of tokens f32[stages, step_kv, SCALE_HEADS].
        of_more = dict(zip(more, refs[len(refs) - len(more) :], strict=True))
        of_extra = dict(zip((*extra, *of_tokens), extra_gmem, strict=True))
        wg = lax.axis_index("wg")
        cta, team = lax.axis_index("cta"), lax.axis_index("team")
        work = Work(*(work_gmem[team, c] for c in range(schedule.WORK_ROW)))
        record = Row(*(work_gmem[team, c] for c in range(schedule.WORK_ROW, schedule.WORK_PAGES)))

        def bounds(row: Row, index: Any) -> tuple[Any, Any, Any]:
            """Tokens [low, high) of a split, and where its steps begin: at the copy that `low` lies in."""
            low, high = split_range(row, row.first + index, row.tokens, xp=jnp)
            base = low if window is None else lax.div(low, jnp.int32(plan.block_kv)) * plan.block_kv
            return base, low, high

        def steps_of(base: Any, high: Any) -> Any:
            return lax.div(jnp.maximum(high - base, 0) + (step_kv - 1), jnp.int32(step_kv))

        def advance(row: Any, index: Any, rec: Row) -> tuple[Any, Any, Row]:
            """The split after this one, and the record of its row."""
            ends = index + 1 >= rec.splits
            row = row + ends.astype(jnp.int32)

            def next_record() -> Row:
                # One past the last row is asked for after the last split, and not used.
                at = jnp.minimum(row, rows_gmem.shape[0] - 1)
                return Row(*(rows_gmem[at, c] for c in range(len(rec))))

            rec = lax.cond(ends, next_record, lambda: rec)
            return row, jnp.where(ends, 0, index + 1), rec

        first = (work.row, work.split, record)

        def of_kv_head(name: str, kv_head: Any) -> Any:
            return of_extra[name][0 if of_extra[name].shape[0] == 1 else kv_head]

        def some_dead(lead: Any, live: Any, bad: Any) -> Any:
            """Whether a step's values have a row that is beyond the split, or of a page that is not there."""
            some = (live < step_kv) if window is None else (live < step_kv) | (lead > 0)
            # Query tokens before a missing page have nothing to do with it; of one token alone, poison says all.
            return some if q_len == 1 else some | (bad != 0)

        def is_dead(row: Any, lead: Any, live: Any, bad: Any) -> Any:
            dead = row >= live if window is None else (row >= live) | (row < lead)
            if q_len > 1:
                for j in range(tile.copies):
                    copy = (row >= j * tile.copy_rows) & (row < (j + 1) * tile.copy_rows)
                    dead = dead | (copy & ((bad & _bit(j)) != 0))
            return dead

        @pl.when(wg == warpgroups)
        def _produce() -> None:
            if moves_registers:
                plgpu.set_max_registers(REGISTERS[0], action="decrease")
            first_head = lax.div(cta * kv_heads, jnp.int32(tile.ctas_per_kv_head))
            first_scale = lax.div(first_head, jnp.int32(SCALE_HEADS)) * SCALE_HEADS
            page_size = jnp.int32(plan.page_size)

            def load_split(u: Any, carry: Any) -> Any:
                used, held, row, index, rec = carry
                base, low, high = bounds(rec, index)
                first_page, last_page = lax.div(low, page_size), lax.div(high - 1, page_size)
                # A split of another row begins with that row's ids.
                held = jnp.where((index == 0) & (u > 0), NONE, held)

                def step(i: Any, carry: Any) -> Any:
                    used, held = carry
                    stage = lax.rem(used, jnp.int32(stages))
                    tokens = [base + i * step_kv + j * tile.copy_rows for j in range(tile.copies)]
                    # Of a copy that is not wanted, the page of one that is.
                    places = [jnp.minimum(lax.div(t, page_size), last_page) for t in tokens]
                    if window is not None:
                        places = [jnp.maximum(place, first_page) for place in places]
                    known = (u == 0) & (i < stages)
                    wanted = jnp.logical_not(known) & (places[-1] >= held + WARPGROUP)
                    held = jnp.where(wanted, jnp.minimum(places[0], pages_gmem.shape[1] - WARPGROUP), held)

                    @pl.when(wanted)
                    def _() -> None:
                        ids_smem[...] = access.load(pages_gmem.at[rec.seq, pl.ds(held, WARPGROUP)], ids_layout)
                        plgpu.commit_smem()

                    pages = lax.cond(
                        known,
                        lambda: [
                            work_gmem[team, schedule.WORK_PAGES + i * tile.copies + j] for j in range(tile.copies)
                        ],
                        lambda: [ids_smem[place - held] for place in places],
                    )
                    # No address is formed from an unchecked id; a bad one poisons its row, in the consumer.
                    ok = [(page >= 0) & (page < num_pages) for page in pages]
                    bad = functools.reduce(
                        jnp.bitwise_or, [jnp.where(good, 0, _bit(j)).astype(jnp.int32) for j, good in enumerate(ok)]
                    )
                    pages = [jnp.where(good, page, 0) for good, page in zip(ok, pages, strict=True)]

                    def wanted_copy(token: Any) -> Any:
                        return token < high if window is None else (token < high) & (token + tile.copy_rows > low)

                    def fill_rows(pool: Any, smem: Any, first: Any, full: Any) -> None:
                        """Of every token, as much as there is room for from `first` on."""
                        for j in range(tile.copies):
                            row = pl.ds(lax.rem(tokens[j], page_size), tile.copy_rows)
                            access.copy_in(
                                pool.at[pages[j], row, pl.ds(first, smem.shape[-1])],
                                smem.at[stage, pl.ds(j * tile.copy_rows, tile.copy_rows)],
                                full.at[stage],
                                wanted=wanted_copy(tokens[j]),
                            )

                    def fill(name: str, pool: Any, smem: Any, rows: int, full: Any) -> None:
                        if name in of_tokens:
                            fill_rows(of_extra[name], of_more[name], first_scale, full)
                        if tile.quantised:
                            fill_rows(pool, smem, lax.div(first_head, jnp.int32(kv_heads)) * smem.shape[-1], full)
                            return
                        for at in range(0, step_kv, rows):
                            j, part = divmod(at, tile.copy_rows)
                            # The heads of a token lie side by side: their copies, one after another, share DRAM pages.
                            for h in range(kv_heads):
                                dst = (stage, h, pl.ds(at, rows))
                                if pool.shape[-1] != smem.shape[-1]:
                                    dst = (*dst, pl.ds(0, pool.shape[-1]))
                                row = pl.ds(lax.rem(tokens[j], page_size) + part, rows)
                                access.copy_in(
                                    pool.at[pages[j], row, first_head + h],
                                    smem.at[dst],
                                    full.at[stage],
                                    # Nothing is read beyond the split: what then lies in the stage is masked.
                                    wanted=wanted_copy(tokens[j]),
                                )

                    @pl.when(used >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(k_free.at[stage])

                    fill("k", k_gmem, k_smem, tile.copy_rows, k_full)

                    @pl.when(used >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(v_free.at[stage])

                    bad_smem[stage] = bad
                    fill("v", v_gmem, v_smem, tile.copy_rows_v, v_full)
                    return used + 1, held

                return *lax.fori_loop(0, steps_of(base, high), step, (used, held)), *advance(row, index, rec)

            lax.fori_loop(0, work.count, load_split, (jnp.int32(0), jnp.int32(NONE), *first))

        @pl.when(wg < warpgroups)
        def _consume() -> None:
            if moves_registers:
                plgpu.set_max_registers(REGISTERS[1], action="increase")
            block = cta * warpgroups + wg
            kv_head = lax.div(block, jnp.int32(tile.blocks))
            capped = softcap is not None and softcap < NO_CAP
            scale = scale_gmem[0] * (1.0 if capped else LOG2E)
            if "k_scale" in of_extra:
                scale = scale * of_kv_head("k_scale", kv_head)
            out_scale = of_kv_head("v_scale", kv_head) if "v_scale" in of_extra else None

            def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            def across(x: jax.Array, rows: int = rows_v) -> jax.Array:
                return lax.broadcast_in_dim(x, (rows, cols), [1])

            def nan_if(flag: Any) -> jax.Array:
                return jnp.where(flag != 0, jnp.float32(jnp.nan), jnp.float32(0))

            none = SplitPartials(
                o=full((rows_v, cols), 0, Layout.WGMMA),
                m=full((cols,), -jnp.inf, PER_HEAD),
                l=full((cols,), 0, PER_HEAD),
            )

            no = jnp.bool_(False)
            kv = 0 if kv_heads == 1 else wg
            head = block * tile.heads
            top = first_row(plan, block)

            sink = None
            if "sinks" in of_extra:
                # One by one: `top` may be odd, and `PER_HEAD` loads pairs. `load_q` waits for all before a reduction.
                sink_smem = reduce_smem.at[wg, pl.ds(0, cols)]
                access.store(sink_smem, access.load(of_extra["sinks"].at[pl.ds(top, cols)], UNPAIRED.reduce(0)))
                plgpu.commit_smem()
                sink = access.load(sink_smem, PER_HEAD)

            def logits(s: jax.Array, scale: Any) -> jax.Array:
                """In base 2."""
                if not capped:
                    return s * scale
                x = s * scale * (1.0 / softcap)
                # By one exponential, which may overflow to where the tangent is 1; by its series where that cancels.
                series = x * (1.0 + x * x * (-1 / 3 + x * x * (2 / 15 + x * x * (-17 / 315))))
                tanh = jnp.where(x * x < 1 / 16, series, 1.0 - 2.0 / (jnp.exp2(x * (2 * LOG2E)) + 1.0))
                return tanh * softcap * LOG2E

            def tokens_of(rec: Row, at: Any, shape: tuple[int, ...], axis: int, layout: Any) -> tuple[Any, Any]:
                """Of each column's query token, the first attended token and the one past the last, from `at` on."""
                column = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
                of_kv_head = column + (top - kv_head * plan.group)
                past = lax.div(of_kv_head, jnp.int32(group)) + (rec.length - at)
                return (None if window is None else past - window), past

            def attended(token: Any, rec: Row, at: Any, lead: Any, live: Any) -> Any:
                mask = token < live if window is None else (token < live) & (token >= lead)
                if q_len > 1:  # each query token up to itself
                    begin, past = tokens_of(rec, at, token.shape, 1, Layout.WGMMA)
                    mask = mask & (token < past)
                    mask = mask if begin is None else mask & (token >= begin)
                return mask

            def poison(bad: Any, rec: Row, at: Any, lead: Any, live: Any) -> Any:
                """NaN where a page's id is outside the pool: of the query tokens that attend any of it."""
                if q_len == 1:
                    return nan_if(bad)

                def of_columns() -> Any:
                    begin, past = tokens_of(rec, at, (cols,), 0, PER_HEAD)
                    begin = jnp.full_like(past, lead) if begin is None else jnp.maximum(begin, lead)
                    past = jnp.minimum(past, live)
                    hit = jnp.zeros_like(past)
                    for j in range(tile.copies):
                        meets = (past > j * tile.copy_rows) & (begin < (j + 1) * tile.copy_rows) & (past > begin)
                        hit = jnp.where(meets, hit | (bad & _bit(j)), hit)
                    return jnp.where(hit != 0, jnp.float32(jnp.nan), jnp.float32(0))

                return lax.cond(bad != 0, of_columns, lambda: full((cols,), 0, PER_HEAD))

            def load_q(seq: Any) -> None:
                at = [pl.ds(lane, chunk) for lane in range(0, plan.head_dim, chunk)]
                # All loads before the first store, which would wait for the load before it.
                parts = [access.load(q_gmem.at[seq, pl.ds(top, cols), lanes], q_layout) for lanes in at]
                if scaled:
                    parts = [x.astype(jnp.float32) for x in parts]
                    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.maximum(x, -x), axis=1) for x in parts])
                    exponent = lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT
                    exponent = jnp.minimum(exponent, 253 << 23)  # of infinities and NaN too
                    access.store(of_more["unit"].at[wg], lax.bitcast_convert_type(exponent, jnp.float32))
                    inverse = lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
                    inverse = lax.broadcast_in_dim(inverse, parts[0].shape, [0])
                    inverse = plgpu.layout_cast(inverse, q_layout)
                    parts = [(x * inverse).astype(half) for x in parts]
                if apart:
                    parts = [access.pairs_apart(x, q_layout) for x in parts]
                for lanes, part in zip(at, parts, strict=True):
                    q_smem[wg, :, lanes] = part
                plgpu.commit_smem()

            def over_tokens(op: str, x: jax.Array) -> jax.Array:
                return access.reduce_rows(op, x, reduce_smem.at[wg], Layout.WGMMA, PER_HEAD)

            def write_partial(slot: Any, at: Any, part: SplitPartials) -> None:
                o_ref = o_gmem.at[slot, block, :, at, pl.ds(0, rows_v)].transpose((1, 0))
                access.store(
                    o_ref, access.lanes_in_order(part.o) if tile.quantised else plgpu.layout_cast(part.o, UNPAIRED)
                )
                access.store(m_gmem.at[slot, block, at], part.m)
                access.store(l_gmem.at[slot, block, at], part.l)

            def write_output(row: Any, acc: SplitPartials) -> None:
                if sink is not None:
                    acc = fold_sink(acc, sink, across)
                out, lse = finish(acc, across)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out = out.astype(dtype)
                access.store(out_smem.at[wg].transpose((1, 0)), access.lanes_in_order(out) if tile.quantised else out)
                access.store(lse_gmem.at[row, block], lse)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    out_smem.at[wg, pl.ds(head - top, tile.heads)], out_gmem.at[row, pl.ds(head, tile.heads)]
                )

            def of_kv(lanes: int) -> Any:
                """This warpgroup's KV head, whose lanes lie beside the other's."""
                return pl.ds(kv * lanes, lanes)

            def load_keys(stage: Any) -> jax.Array:
                """Of quantised pages: they are multiplied from registers."""
                layout = access.FOURS if apart else Layout.WGMMA_UPCAST_2X
                keys = access.load_tile(k_smem.at[stage].at[:, of_kv(plan.head_dim)], layout)
                plgpu.barrier_arrive(k_free.at[stage])
                return access.operand_apart(keys) if apart else access.half_operand(keys)

            def load_values(stage: Any, dead: Any, some: Any) -> jax.Array:
                """Of quantised pages, lanes by tokens, as `access.load_transposed` has them."""
                values = access.load_transposed(v_smem.at[stage].at[:, of_kv(plan.head_dim_v)], byte_tiled, rows_v)
                plgpu.barrier_arrive(v_free.at[stage])

                def masked() -> jax.Array:
                    token = plgpu.broadcasted_iota(jnp.int32, values.shape, 1, layout=Layout.WGMMA)
                    return jnp.where(dead(token), jnp.zeros_like(values), values)

                # Masked by select: a weight of 0 would leave a NaN behind the sequence's end.
                return lax.cond(some, masked, lambda: values)

            def token_scales(name: str, stage: Any) -> jax.Array:
                of_step = of_more[name].at[stage, :, lax.rem(kv_head, jnp.int32(SCALE_HEADS))]
                return lax.broadcast_in_dim(access.load(of_step, Layout.WGMMA.reduce(1)), (step_kv, cols), [0])

            def scale_weights(p: jax.Array, a: jax.Array, size: list[jax.Array], scales: jax.Array) -> Any:
                """Weights times their values' scales, over a power of two that the largest so far is near to.

                Args:
                  p, a: weights, 2**lift of them, and what the sum so far is multiplied by.
                  size: of the sum so far, that power of two.
                  scales: of the step's values, 0 where a query attends none.
                """
                p = (p * 2.0**-lift) * scales
                largest = lax.bitcast_convert_type(over_tokens("max", jnp.maximum(p, -p)), jnp.int32) & EXPONENT
                before = lax.bitcast_convert_type(jnp.maximum(a * size[0], LEAST_SIZE), jnp.int32)
                now = jnp.minimum(jnp.maximum(largest, before), 253 << 23)
                inverse = lax.bitcast_convert_type((254 << 23) - now, jnp.float32)
                p = p * across(inverse, step_kv) * 2.0**lift
                return p, a * (size[0] * inverse), [lax.bitcast_convert_type(now, jnp.float32)]

            def compute_split(u: Any, carry: Any) -> Any:
                used, row, index, rec, whole, run_whole, acc, run = carry
                base, low, high = bounds(rec, index)
                begins, place = index == 0, lax.rem(index, jnp.int32(RUN_SPLITS))
                # Whether this CTA has folded the row, and the run, from its first split on.
                whole, run_whole = whole | begins, run_whole | (place == 0)

                @pl.when(begins | (u == 0))
                def _() -> None:
                    load_q(rec.seq)

                units = across(access.load(of_more["unit"].at[wg], PER_HEAD) * scale, step_kv) if scaled else scale

                def step(i: Any, carry: Any) -> Any:
                    used, o, m, l, *size = carry
                    stage = lax.rem(used, jnp.int32(stages))
                    at = base + i * step_kv
                    lead, live = low - at, high - at
                    plgpu.barrier_wait(k_full.at[stage])
                    scale_of = units * token_scales("k", stage) if "k" in of_tokens else units

                    def qk(acc_ref: Any) -> jax.Array:
                        keys = load_keys(stage) if tile.quantised else k_smem.at[stage, kv]
                        plgpu.wgmma(acc_ref, keys, q_smem.at[wg].transpose((1, 0)))
                        return acc_ref[...]

                    s = pl.run_scoped(qk, plgpu.ACC((step_kv, cols), jnp.float32))
                    if not tile.quantised:
                        plgpu.barrier_arrive(k_free.at[stage])
                    token = plgpu.broadcasted_iota(jnp.int32, (step_kv, cols), 0, layout=Layout.WGMMA)
                    mask = attended(token, rec, at, lead, live)
                    s = jnp.where(mask, logits(s, scale_of), -jnp.inf)
                    m_new = to_whole(jnp.maximum(m, over_tokens("max", s)))
                    plgpu.barrier_wait(v_full.at[stage])
                    bad = bad_smem[stage]
                    m_new = m_new + poison(bad, rec, at, lead, live)
                    p = rescale(s, across(m_new - lift, step_kv))
                    a = rescale(m, m_new)
                    # Summed over tokens once, at the split's end.
                    l = l * across(a, step_kv) + p
                    if "v" in of_tokens:
                        p, a, size = scale_weights(p, a, size, jnp.where(mask, token_scales("v", stage), 0.0))
                    o = o * across(a)
                    p_smem.at[wg].transpose((1, 0))[...] = p.astype(half)
                    dead = functools.partial(is_dead, lead=lead, live=live, bad=bad)
                    if tile.quantised:
                        values = load_values(stage, dead, some_dead(lead, live, bad))
                    else:
                        in_smem = v_smem.at[stage, kv]

                        @pl.when(some_dead(lead, live, bad))
                        def _() -> None:
                            # Masked by select: a weight of 0 would leave a NaN behind the sequence's end. Warpgroups
                            # that share the values write the same to them.
                            for at in range(0, rows_v, ROWS):
                                v = in_smem[:, pl.ds(at, ROWS)]
                                row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=Layout.WGMMA)
                                in_smem[:, pl.ds(at, ROWS)] = jnp.where(dead(row), jnp.zeros_like(v), v)

                        values = in_smem.transpose((1, 0))
                    plgpu.commit_smem()

                    def pv(acc_ref: Any) -> None:
                        plgpu.wgmma(acc_ref, values, p_smem.at[wg].transpose((1, 0)))

                    o = pl.run_state(pv)(plgpu.ACC.init(o))
                    if not tile.quantised:
                        plgpu.barrier_arrive(v_free.at[stage])
                    return used + 1, o, m_new, l, *size

                size = [full((cols,), LEAST_SIZE, PER_HEAD)] if "v" in of_tokens else []
                none_l = full((step_kv, cols), 0, Layout.WGMMA)
                used, o, m, l, *size = lax.fori_loop(
                    0, steps_of(base, high), step, (used, none.o, none.m, none_l, *size)
                )
                l = over_tokens("add", l)
                if size:  # no longer lifted: what is large might overflow
                    o, l = o * 2.0**-lift * across(size[0]), l * 2.0**-lift
                else:
                    m = m - lift
                if out_scale is not None:
                    o = o * out_scale
                part = SplitPartials(o=o, m=m + nan_if(rec.poison), l=l)
                run = fold(choose(place == 0, none, run), part, across)
                ends = index == rec.splits - 1
                run_ends = ends | (place == RUN_SPLITS - 1)
                acc = choose(begins, none, acc)
                acc = lax.cond(run_ends & whole, lambda: fold(acc, run, across), lambda: acc)
                leaves = u == work.count - 1
                # Whether the fold of the row's whole runs goes to the combine.
                handed = whole & leaves & jnp.logical_not(ends) if tile.direct else whole & (leaves | ends)
                slot = jnp.where(whole, work.last_slot, work.slot) if tile.direct else row

                cut = jnp.logical_not(run_whole)
                written = cut | jnp.where(run_ends, jnp.logical_not(whole), leaves)
                # Of a row whose first run is cut, that run is all there is.
                handed = handed & (run_ends | (index >= RUN_SPLITS))
                done = whole & ends if tile.direct else no

                # One branch around all that most splits skip: instructions that are jumped to are waited for.
                @pl.when(written | handed | done)
                def _() -> None:
                    @pl.when(written)
                    def _() -> None:
                        write_partial(slot, jnp.where(cut, index, index - place), choose(cut, part, run))

                    @pl.when(handed)
                    def _() -> None:
                        write_partial(slot, 0, acc)

                    if tile.direct:

                        @pl.when(done)
                        def _() -> None:
                            write_output(rec.row, acc)

                whole, run_whole = whole & jnp.logical_not(ends), run_whole & jnp.logical_not(run_ends)
                return used, *advance(row, index, rec), whole, run_whole, acc, run

            lax.fori_loop(0, work.count, compute_split, (jnp.int32(0), *first, no, no, none, none))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = f"splitk_split_s{plan.num_splits}_t{step_kv}x{stages}"
    out, lse, *partials = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((rows, plan.num_q_heads, plan.head_dim_v), dtype),
            jax.ShapeDtypeStruct((rows, head_blocks, cols), jnp.float32),
            jax.ShapeDtypeStruct((slots, head_blocks, cols, plan.scratch_splits, tile.lanes), jnp.float32),
            jax.ShapeDtypeStruct((slots, head_blocks, plan.scratch_weights, cols), jnp.float32),
            jax.ShapeDtypeStruct((slots, head_blocks, plan.scratch_weights, cols), jnp.float32),
        ],
        scratch_types=[
            *loaded,
            plgpu.SMEM((warpgroups, cols, plan.head_dim), half, transforms=tiled),
            plgpu.SMEM((warpgroups, cols, step_kv), half, transforms=tiled),
            plgpu.SMEM((warpgroups, cols, rows_v), dtype),
            plgpu.SMEM((warpgroups, REDUCTION_BYTES // 4), jnp.float32),
            plgpu.SMEM((stages,), jnp.int32),
            plgpu.SMEM((WARPGROUP,), jnp.int32),
            plgpu.Barrier(num_arrivals=key_copies + ("k" in of_tokens) * tile.copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=value_copies + ("v" in of_tokens) * tile.copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            *more.values(),
        ],
        grid=(plan.ctas, plan.launch_teams),
        grid_names=("cta", "team"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        q,
        k_pages,
        v_pages,
        block_tables,
        sm_scale.reshape(1),
        sched.rows,
        sched.work,
        *extra.values(),
        *of_tokens.values(),
    )
    return Launched(out, lse, SplitPartials(*partials), sched)
