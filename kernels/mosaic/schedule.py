"""Schedule of the mosaic backend: which CTAs compute which splits, from the lengths of the whole batch.

The tree of a sequence comes from the plan and its own length alone; who computes a split moves no bit, so this may read
anything. Everything here is a few small integers, which XLA computes once for all layers of a step.

The splits of the batch, row after row, are cut into one contiguous range for each *team*. A team is one CTA for each
block of heads: its CTAs read the same pages at the same time, each its heads' part, so that DRAM sees whole pages.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from splitk_jax.plan import RUN_SPLITS, DecodePlan, split_range
from splitk_jax.policy import ceil_div

SPLIT_OVERHEAD = 0.1
"""What a split costs beside its tokens, in pipeline steps: its fold, of which most hides behind the loads."""

ALIGNED = 0.08
"""How much more or less than its share a team may get so that a row is whole, or shared by whole teams: of a row that a
boundary cuts, partials are written and read again."""

EXCESS = (0.04, 0.08, 0.12, 0.16, 0.2, 0.25)
"""How much more than its share, in shares, a team may get where rows come in whole teams; tried in order."""

COARSE = 0.125
"""Shares that a split of a long row costs from which on the row gets whole teams."""

SNAP = 0.04
"""How far from its share, in shares, a boundary moves to lie between two rows or two runs of splits."""


class Row(NamedTuple):
    """What the kernel knows of a row: query tokens of one sequence whose splits have the same edges.

    Attributes:
      row: which row of the launch: the place among all query tokens of the batch of the row's first.
      seq: which sequence of the batch.
      length: tokens that the sequence's first query token attends up to; the next one attends one more.
      start: first attended token.
      origin, span, first: split `s`, counted from the row's first, begins at `origin + (first + s) * span`, or at
        `start` where that is later.
      splits: how many; at least 1, so that a row without tokens is written too. 0 of a query token that is in the row
        of one before it.
      tokens: the row's, its last query token's; 0 where its length cannot be served.
      poison: 1 where the row is to come out NaN.
    """

    row: Any
    seq: Any
    length: Any
    start: Any
    origin: Any
    span: Any
    first: Any
    splits: Any
    tokens: Any
    poison: Any


class Work(NamedTuple):
    """What a team computes.

    Attributes:
      row, split: where its range begins; the row by its place in the schedule.
      count: splits.
      slot: the scratch slot of the row that it starts inside of.
      last_slot: the scratch slot of the row that it leaves to the next team.
    """

    row: Any
    split: Any
    count: Any
    slot: Any
    last_slot: Any


class Merge(NamedTuple):
    """How the partials of a scratch slot become an output.

    Attributes:
      row: which row of the launch.
      splits: all of the row's; 0 where nothing is to be done.
      reads: runs of splits of which there are partials.
    """

    row: Any
    splits: Any
    reads: Any


class Schedule(NamedTuple):
    """Records that the kernels read.

    Attributes:
      rows: i32[batch * q_len, 10]. A `Row` each.
      work: i32[teams, 15 + copies]. A `Work`, the `Row` that it begins in, and the pages of its first split's first
        steps, a step for each stage, so that nothing stands between this record and a CTA's first copies.
      merge: i32[slots, 3 + runs]. A `Merge` each, and its reads in order: twice the run, and 1 more where there are
        partials beyond the run's first.
      written: i32[slots, scratch_weights]. 1 where there is a partial of the split, which may be a fold of some that
        follow it.
      row_of: i32[batch, q_len]. The row of the launch that each query token is in.
    """

    rows: jax.Array
    work: jax.Array
    merge: jax.Array
    written: jax.Array
    row_of: jax.Array


WORK_ROW = len(Work._fields)
WORK_PAGES = WORK_ROW + len(Row._fields)
MERGE_SPLITS = Merge._fields.index("splits")
MERGE_READS = len(Merge._fields)


def row_records(
    seq_lens: jax.Array, *, plan: DecodePlan, capacity: int, window: int | None, q_len: int
) -> tuple[Row, jax.Array]:
    """The record of every query token, with the plan's edges for its own length; and the row that each is in."""
    batch, at = seq_lens.shape[0], jnp.arange(q_len)
    own = seq_lens[:, None] - (q_len - 1 - at)[None, :]
    length_ok = (seq_lens[:, None] >= 0) & (own <= capacity)
    own = jnp.where(length_ok, jnp.maximum(own, 0), 0)
    edges = plan.edges(own, window=window, xp=jnp)
    # Query tokens are in one row while what decides where its splits and its steps begin is the same.
    what = [edges.origin, edges.span, edges.first, edges.start // plan.block_kv, length_ok.astype(jnp.int32)]
    other = functools.reduce(jnp.logical_or, [x[:, 1:] != x[:, :-1] for x in what])
    leads = jnp.pad(other, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(other, ((0, 0), (0, 1)), constant_values=True)
    behind, ahead = at[None, None, :] <= at[None, :, None], at[None, None, :] >= at[None, :, None]
    lead = jnp.max(jnp.where(leads[:, None, :] & behind, at[None, None, :], 0), axis=2)
    last = jnp.min(jnp.where(ends[:, None, :] & ahead, at[None, None, :], q_len - 1), axis=2)
    stop, tokens = (jnp.take_along_axis(x, last, axis=1) for x in (edges.stop, own))
    seq = jnp.broadcast_to(jnp.arange(batch)[:, None], own.shape)
    record = Row(
        row=seq * q_len + at[None, :],
        seq=seq,
        length=jnp.broadcast_to(seq_lens[:, None] - (q_len - 1), own.shape),
        start=edges.start,
        origin=edges.origin,
        span=edges.span,
        first=edges.first,
        splits=jnp.where(leads, jnp.maximum(stop - edges.first, 1), 0),
        tokens=tokens,
        poison=jnp.where(length_ok, 0, 1),
    )
    return Row(*(x.reshape(-1) for x in record)), seq * q_len + lead


def make_schedule(
    seq_lens: jax.Array,  # i32[batch]
    block_tables: jax.Array,  # i32[batch, max_pages_per_seq]
    *,
    plan: DecodePlan,
    window: int | None,
    q_len: int = 1,
) -> Schedule:
    """Balances the splits of a batch over the teams of a launch by tokens.

    Args:
      seq_lens: tokens of each sequence.
      block_tables: pages of each.
      plan: the launch: of several query tokens, the plan that packs them.
      window: tokens that a query token attends, itself included.
      q_len: query tokens of a sequence.
    """
    rows, teams, tile = seq_lens.shape[0] * q_len, plan.launch_teams, plan.mosaic_tile
    assert plan.stages is not None  # a plan of this backend has them
    capacity = min(block_tables.shape[1] * plan.page_size, plan.max_tokens)
    rec, row_of = row_records(seq_lens, plan=plan, capacity=capacity, window=window, q_len=q_len)

    def costs(rec: Row) -> tuple[jax.Array, jax.Array]:
        """What a split of each row and what the row costs, in pipeline steps."""
        splits, tokens = (x.astype(jnp.float32) for x in (jnp.maximum(rec.splits, 1), rec.tokens - rec.start))
        cost = tokens / plan.step_kv + SPLIT_OVERHEAD * splits
        return cost / splits, jnp.where(rec.splits > 0, cost, 0.0)

    def upto(x: jax.Array) -> jax.Array:
        """Sums up to and including each."""
        at = jnp.arange(len(x))
        return jnp.sum(jnp.where(at[:, None] >= at[None, :], x[None, :], 0), axis=1)

    def first_where(x: jax.Array) -> jax.Array:
        """Which come where those that are chosen come first, else in their order."""
        at, ahead = jnp.arange(len(x)), upto(x.astype(jnp.int32))
        place = jnp.where(x, ahead - 1, ahead[-1] + at - ahead)
        return jnp.sum(jnp.where(place[None, :] == at[:, None], at[None, :], 0), axis=1)

    if q_len > 1:  # query tokens that are in another's row come last, where nothing reaches them
        order = first_where(rec.splits > 0)
        rec = Row(*(x[order] for x in rec))

    # Rows that some number of whole teams computes come first, and get them: long rows of long splits, which share no
    # team well, and rows that fill their teams. Tried with the least excess over a team's share first.
    split_cost, cost = costs(rec)
    share = jnp.sum(cost) / teams
    limit = (1 + jnp.array(EXCESS, jnp.float32))[:, None] * share
    most = jnp.maximum(jnp.floor(limit / split_cost[None, :]).astype(jnp.int32), 1)
    whole_teams = ceil_div(rec.splits[None, :], most)
    snug = cost[None, :] >= (1 - ALIGNED) * share * whole_teams.astype(jnp.float32)
    snug = (snug | ((cost > share) & (split_cost > COARSE * share))[None, :]) & (rec.splits > 0)[None, :]
    left = teams - jnp.sum(jnp.where(snug, whole_teams, 0), axis=1)
    rest = jnp.sum(jnp.where(snug, 0.0, cost[None, :]), axis=1)
    # Of ranges cut at the nearest split, the largest has about three quarters of a long row's split too much.
    cut = jnp.max(jnp.where(cost > share, split_cost, 0.0)) * 0.75
    better = limit[:, 0] - share <= jnp.maximum(ALIGNED * share, cut)
    fits = better & (rest <= limit[:, 0] * left.astype(jnp.float32))
    which = jnp.argmax(fits)
    snug, whole_teams = snug[which] & fits[which], whole_teams[which]
    order = first_where(snug)
    rec, whole_teams = Row(*(x[order] for x in rec)), jnp.where(snug, whole_teams, 0)[order]
    splits, (split_cost, cost) = rec.splits, costs(rec)
    splits_end, cost_end, teams_end = upto(splits), upto(cost), upto(whole_teams)
    splits_begin, cost_begin = splits_end - splits, cost_end - cost

    # Of each of the other teams' share of the cost, the nearest split, run and row.
    team = jnp.arange(teams + 1)
    apart, left = jnp.sum(jnp.where(whole_teams > 0, cost, 0.0)), teams - teams_end[-1]
    share = jnp.where(left > 0, (cost_end[-1] - apart) / jnp.maximum(left, 1).astype(jnp.float32), 0.0)
    at = apart + share * jnp.maximum(team - teams_end[-1], 0).astype(jnp.float32)
    row = jnp.minimum(jnp.sum(cost_end[None, :] <= at[:, None], axis=1), rows - 1)
    within = (at - cost_begin[row]) / split_cost[row]
    to_split, to_run = jnp.round(within), RUN_SPLITS * jnp.round(within / RUN_SPLITS)
    near = jnp.abs(to_run - within) * split_cost[row] <= SNAP * share
    begin = splits_begin[row] + jnp.clip(jnp.where(near, to_run, to_split).astype(jnp.int32), 0, splits[row])
    lower = at - cost_begin[row] <= cost_end[row] - at
    edge = jnp.where(lower, cost_begin[row], cost_end[row])
    last = team == teams
    edge = jnp.where(last, cost_end[-1], edge)
    allowed = jnp.maximum((1 + ALIGNED) * cost_end[-1] / teams, (1 + SNAP) * share)
    to_rows = (jnp.max(edge[1:] - edge[:-1]) <= allowed) | (jnp.abs(edge - at) <= SNAP * share)
    begin = jnp.where(to_rows, jnp.where(lower, splits_begin[row], splits_end[row]), begin)
    row = jnp.minimum(jnp.sum(teams_end[None, :] <= team[:, None], axis=1), rows - 1)
    part = (team - (teams_end - whole_teams)[row]) * splits[row] // jnp.maximum(whole_teams[row], 1)
    begin = jnp.where(team < teams_end[-1], splits_begin[row] + part, begin)
    begin = jnp.where(last, splits_end[-1], begin)
    count, begin, team = begin[1:] - begin[:-1], begin[:-1], team[:-1]

    row = jnp.minimum(jnp.sum(splits_end[None, :] <= begin[:, None], axis=1), rows - 1).astype(jnp.int32)
    split = begin - splits_begin[row]
    if plan.scratch_slots(rows) == rows:
        slot, last_slot = row, jnp.append(row[1:], 0)
        merged, used = jnp.arange(rows), jnp.ones(rows, bool)
    else:
        # The first team that starts inside a row names its slot; one without work may start past the last row.
        slot = jnp.sum(begin[None, :] <= (begin - split)[:, None], axis=1)
        last_slot = team + 1
        merged, used = row, (slot == team) & (split < splits[row])
    boundary = begin[None, :] - splits_begin[merged][:, None]
    of_row = splits[merged]
    boundary = jnp.where((boundary > 0) & (boundary < of_row[:, None]), boundary, of_row[:, None])
    cut = jnp.min(boundary, axis=1)
    if tile.direct:
        used &= cut < of_row
    # The splits that one team has folded into the partial of the first: in whole runs, and in each later run those
    # before the first boundary in it; of the others there is a partial each.
    prefix = jnp.where(cut < of_row, cut // RUN_SPLITS * RUN_SPLITS, of_row)[:, None, None]
    run, place = jnp.arange(plan.runs)[None, :, None], jnp.arange(RUN_SPLITS)[None, None, :]
    before = boundary[:, None, :] - run * RUN_SPLITS
    inside = (before > 0) & (before < RUN_SPLITS) & (boundary < of_row[:, None])[:, None, :]
    held = jnp.min(jnp.where(inside, before, RUN_SPLITS), axis=2, keepdims=True)
    index = run * RUN_SPLITS + place
    written = jnp.where(index < prefix, index == 0, (place == 0) | (place >= held))
    written = (written & (index < of_row[:, None, None]) & used[:, None, None]).astype(jnp.int32)
    read, index = jnp.any(written > 0, axis=2), jnp.arange(plan.runs)
    entry = 2 * index[None, :] + jnp.any(written[:, :, 1:] > 0, axis=2).astype(jnp.int32)
    nth = jnp.cumsum(read.astype(jnp.int32), axis=1) - 1
    chosen = read[:, None, :] & (nth[:, None, :] == index[None, :, None])
    reads = jnp.sum(jnp.where(chosen, entry[:, None, :], 0), axis=2)
    written = written.reshape(len(used), -1)
    # Not cut to size: XLA makes one command of a call and a slice that it reads, which a CUDA graph updates each time.
    written = jnp.pad(written, ((0, 0), (0, plan.scratch_weights - written.shape[1])))
    merge = Merge(rec.row[merged], jnp.where(used, of_row, 0), jnp.sum(read, axis=1))

    first = Row(*(x[row] for x in rec))
    low, high = split_range(first, first.first + split, first.tokens, xp=jnp)
    first_page, last_page = low // plan.page_size, jnp.maximum(high - 1, 0) // plan.page_size
    low = low // plan.block_kv * plan.block_kv
    ahead = jnp.arange(plan.stages * tile.copies, dtype=jnp.int32) * tile.copy_rows
    page = (low[:, None] + ahead[None, :]) // plan.page_size
    page = jnp.minimum(jnp.maximum(page, first_page[:, None]), last_page[:, None])
    work = jnp.stack([*Work(row, split, count, slot, last_slot), *first], axis=1)
    return Schedule(
        rows=jnp.stack(rec, axis=1).astype(jnp.int32),
        work=jnp.concatenate([work, block_tables[first.seq[:, None], page]], axis=1).astype(jnp.int32),
        merge=jnp.concatenate([jnp.stack(merge, axis=1), reads], axis=1).astype(jnp.int32),
        written=written,
        row_of=row_of.astype(jnp.int32),
    )
