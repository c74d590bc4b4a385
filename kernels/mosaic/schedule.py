"""Schedule of the mosaic backend: which CTAs compute which splits, from the lengths of the whole batch.

The tree of a sequence comes from the plan and its own length alone; who computes a split moves no bit, so this may read
anything. Everything here is a few small integers, which XLA computes once for all layers of a step.

The splits of the batch, row after row, are cut into one contiguous range for each *team*. A team is one CTA for each
block of heads: its CTAs read the same pages at the same time, each its heads' part, so that DRAM sees whole pages.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from splitk_jax.plan import DecodePlan

SPLIT_OVERHEAD = 0.5
"""What a split costs beside its tokens, in pipeline steps: its fold and its write."""

ALIGNED = 0.08
"""How much more than its share a team may get so that no row is shared, and no partial is written and read again."""

SNAP = 0.04
"""How far from its share, in shares, a boundary moves to lie between two rows."""


class Row(NamedTuple):
    """What the kernel knows of a row.

    Attributes:
      start: first attended token.
      origin, span, first: split `s`, counted from the row's first, begins at `origin + (first + s) * span`, or at
        `start` where that is later.
      splits: how many; at least 1, so that a row without tokens is written too.
      tokens: the row's; 0 where its length cannot be served.
      poison: 1 where the row is to come out NaN.
    """

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
      row, split: where its range begins.
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
    """What the combine does for a scratch slot.

    Attributes:
      row: whose.
      prefix: splits that one team has folded already, 0 where nothing is left to do.
      splits: all of the row's.
    """

    row: Any
    prefix: Any
    splits: Any


class Schedule(NamedTuple):
    """Records that the kernels read.

    Attributes:
      rows: i32[batch, 8]. A `Row` each.
      work: i32[teams, 12 + copies]. A `Work`, the `Row` that it begins in, and the pages of its first split's first
        steps, a step for each stage, so that nothing stands between this record and a CTA's first copies.
      merge: i32[slots, 4]. A `Merge` each.
    """

    rows: jax.Array
    work: jax.Array
    merge: jax.Array


WORK_ROW = len(Work._fields)
WORK_PAGES = WORK_ROW + len(Row._fields)


def row_record(seq_lens: jax.Array, *, plan: DecodePlan, capacity: int, window: int | None) -> Row:
    """The record of every row: the plan's edges for its own length."""
    length_ok = (seq_lens >= 0) & (seq_lens <= capacity)
    tokens = jnp.where(length_ok, seq_lens, 0)
    edges = plan.edges(tokens, window=window, xp=jnp)
    return Row(
        start=edges.start,
        origin=edges.origin,
        span=edges.span,
        first=edges.first,
        splits=jnp.maximum(edges.stop - edges.first, 1),
        tokens=tokens,
        poison=jnp.where(length_ok, 0, 1),
    )


def make_schedule(
    seq_lens: jax.Array,  # i32[batch]
    block_tables: jax.Array,  # i32[batch, max_pages_per_seq]
    *,
    plan: DecodePlan,
    window: int | None,
) -> Schedule:
    """Balances the splits of a batch over the teams of a launch by tokens."""
    batch, teams, tile = seq_lens.shape[0], plan.launch_teams, plan.mosaic_tile
    assert plan.stages is not None  # a plan of this backend has them
    capacity = min(block_tables.shape[1] * plan.page_size, plan.max_tokens)
    rec = row_record(seq_lens, plan=plan, capacity=capacity, window=window)
    splits = rec.splits

    # Up to and including each row: splits, and what they cost.
    split_cost = jnp.minimum(rec.span, rec.tokens).astype(jnp.float32) / plan.step_kv + SPLIT_OVERHEAD
    cost = splits.astype(jnp.float32) * split_cost
    upto = jnp.arange(batch)[:, None] >= jnp.arange(batch)[None, :]
    splits_end = jnp.sum(jnp.where(upto, splits[None, :], 0), axis=1)
    cost_end = jnp.sum(jnp.where(upto, cost[None, :], 0.0), axis=1)
    splits_begin, cost_begin = splits_end - splits, cost_end - cost

    # Of each team's share of the cost, the nearest split, and the nearest row.
    team = jnp.arange(teams + 1)
    share = cost_end[-1] / teams
    at = share * team.astype(jnp.float32)
    row = jnp.minimum(jnp.sum(cost_end[None, :] <= at[:, None], axis=1), batch - 1)
    within = jnp.round((at - cost_begin[row]) / split_cost[row]).astype(jnp.int32)
    begin = splits_begin[row] + jnp.clip(within, 0, splits[row])
    lower = at - cost_begin[row] <= cost_end[row] - at
    edge = jnp.where(lower, cost_begin[row], cost_end[row])
    last = team == teams
    edge = jnp.where(last, cost_end[-1], edge)
    to_rows = (jnp.max(edge[1:] - edge[:-1]) <= (1 + ALIGNED) * share) | (jnp.abs(edge - at) <= SNAP * share)
    begin = jnp.where(to_rows, jnp.where(lower, splits_begin[row], splits_end[row]), begin)
    # Or several whole teams for each row.
    several = jnp.maximum(jnp.ceil(cost / ((1 + ALIGNED) * share)).astype(jnp.int32), 1)
    most = jnp.max(((splits + several - 1) // several).astype(jnp.float32) * split_cost)
    teams_end = jnp.sum(jnp.where(upto, several[None, :], 0), axis=1)
    row = jnp.minimum(jnp.sum(teams_end[None, :] <= team[:, None], axis=1), batch - 1)
    part = jnp.minimum(team - (teams_end - several)[row], several[row])
    fits = (teams_end[-1] <= teams) & (most <= (1 + ALIGNED) * share)
    begin = jnp.where(fits, splits_begin[row] + part * splits[row] // several[row], begin)
    begin = jnp.where(last, splits_end[-1], begin)
    count, begin, team = begin[1:] - begin[:-1], begin[:-1], team[:-1]

    row = jnp.minimum(jnp.sum(splits_end[None, :] <= begin[:, None], axis=1), batch - 1).astype(jnp.int32)
    split = begin - splits_begin[row]
    if plan.scratch_slots(batch) == batch:
        slot, last_slot = row, jnp.append(row[1:], 0)
        inside = (begin[None, :] > splits_begin[:, None]) & (begin[None, :] < splits_end[:, None])
        prefix = jnp.min(jnp.where(inside, begin[None, :] - splits_begin[:, None], splits[:, None]), axis=1)
        if tile.direct:
            prefix = jnp.where(prefix < splits, prefix, 0)
        merge = Merge(jnp.arange(batch), prefix, splits)
    else:
        # The first team that starts inside a row names its slot; one without work may start past the last row.
        slot = jnp.sum(begin[None, :] <= (begin - split)[:, None], axis=1)
        last_slot = team + 1
        merge = Merge(row, jnp.where((slot == team) & (split < splits[row]), split, 0), splits[row])

    first = Row(*(x[row] for x in rec))
    low = jnp.maximum(first.start, first.origin + (first.first + split) * first.span)
    high = jnp.minimum(first.origin + (first.first + split + 1) * first.span, first.tokens)
    last_page = jnp.maximum(high - 1, 0) // plan.page_size
    ahead = jnp.arange(plan.stages * tile.copies, dtype=jnp.int32) * tile.copy_rows
    page = jnp.minimum((low[:, None] + ahead[None, :]) // plan.page_size, last_page[:, None])
    work = jnp.stack([*Work(row, split, count, slot, last_slot), *first], axis=1)
    return Schedule(
        rows=jnp.stack([*rec, jnp.zeros_like(splits)], axis=1),
        work=jnp.concatenate([work, block_tables[row[:, None], page]], axis=1).astype(jnp.int32),
        merge=jnp.stack([*merge, jnp.zeros_like(merge.splits)], axis=1).astype(jnp.int32),
    )
