"""`splitk-jax explain --plot`: a plan's decision as a picture. Needs matplotlib."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from splitk_jax.plan import DecodePlan

LONGEST = 131072
"""Tokens that the pictures go to, where a plan was not made for fewer."""

RAGGED = (1, 0.5, 0.3, 0.125, 0.045, 0.012)
"""The sequences whose trees are drawn, in longest ones."""

SHADES = ("#1f4e79", "#4a90c8")
"""Splits in turn; apart from one another without their colours, too, and both from white."""

STYLES = ("-", "--", "-.", ":", (0, (1, 3)))
"""Lines of each batch that a report shows."""


class Series(NamedTuple):
    """What a batch of equally long sequences launches, by their length.

    Attributes:
      tokens: the lengths at which the count moves, from 1, and the longest.
      splits: active splits of one sequence, from each length up to the next.
      ctas: CTAs of work of the batch, a split each.
    """

    tokens: np.ndarray
    splits: np.ndarray
    ctas: np.ndarray


def series(plan: DecodePlan, longest: int) -> dict[int, Series]:
    """The series of each batch that a report shows; of a rule that reads the batch, each has a tree of its own."""
    # All that a count depends on is rounded up to blocks, so it moves only where one begins.
    tokens = np.arange(1, longest + 1, plan.block_kv)
    found = {}
    for batch in plan.report_batches:
        edges = replace(plan, num_splits=plan.splits_at(batch)).edges(tokens)
        splits = edges.stop - edges.first
        moved = np.flatnonzero(np.diff(splits, prepend=0))
        moved = np.append(moved, len(tokens) - 1)
        at = np.append(tokens[moved[:-1]], longest)
        found[batch] = Series(at, splits[moved], batch * splits[moved] * plan.ctas)
    return found


def plot_plan(plan: DecodePlan, path: str, seq_lens: Sequence[int] | None = None) -> None:
    """Draws active splits and CTAs by context and batch, and the split trees of a ragged batch to scale.

    Args:
      plan: the decision.
      path: of the PNG; on white, so that dark pages show it too.
      seq_lens: tokens of each sequence of the ragged batch; `RAGGED` when None.
    """
    longest = min(plan.max_tokens, LONGEST, *([] if plan.max_seq_len is None else [plan.max_seq_len]))
    if seq_lens is None:
        seq_lens = [max(round(share * longest), 1) for share in RAGGED]
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, 7.5), layout="constrained", facecolor="white"
    )
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.1))
    target = "no target" if plan.policy.target is None else plan.policy.target.name
    by_batch = series(plan, longest)
    figure.suptitle(
        f"{target}: {plan.num_q_heads}/{plan.num_kv_heads} heads of {plan.head_dim}, {plan.policy.rule},"
        f" up to {max(map(plan.splits_at, by_batch))} splits"
    )
    _draw_splits(figure.add_subplot(grid[0, 0]), by_batch)
    _draw_ctas(figure.add_subplot(grid[0, 1]), by_batch, plan.policy.sm_count)
    _draw_trees(figure.add_subplot(grid[1, :]), plan, seq_lens)
    figure.savefig(path, dpi=130)


def _draw_splits(axes: Any, by_batch: dict[int, Series]) -> None:
    if len({tuple(each.splits) for each in by_batch.values()}) == 1:
        by_batch = {0: next(iter(by_batch.values()))}
    for i, (batch, each) in enumerate(by_batch.items()):
        _step(axes, each.tokens, each.splits, i, f"batch {batch}" if batch else "at every batch")
    axes.set_ylabel("active splits of one sequence")
    axes.set_ylim(bottom=0)
    _finish(axes, next(iter(by_batch.values())).tokens[-1])


def _draw_ctas(axes: Any, by_batch: dict[int, Series], sm_count: int) -> None:
    for i, (batch, each) in enumerate(by_batch.items()):
        _step(axes, each.tokens, each.ctas, i, f"batch {batch}")
    axes.axhline(sm_count, color="#bb2211", linewidth=1.2, label=f"{sm_count} SMs")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("CTAs of work, a split each")
    _finish(axes, next(iter(by_batch.values())).tokens[-1])


def _step(axes: Any, tokens: np.ndarray, counts: np.ndarray, i: int, label: str) -> None:
    axes.step(tokens, counts, where="post", color=str(0.4 - 0.1 * i), linestyle=STYLES[i], linewidth=1.4, label=label)


def _finish(axes: Any, longest: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(64, max(longest // 16, 1)), longest * 1.05)
    axes.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    axes.set_xlabel("context, tokens")
    axes.grid(color="0.88")
    # Above the axes, where no line is.
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small", frameon=False, columnspacing=1)


def _draw_trees(axes: Any, plan: DecodePlan, seq_lens: Sequence[int]) -> None:
    for row, seq_len in enumerate(seq_lens):
        bounds = [(low, high) for low, high in plan.split_bounds(seq_len) if high > low]
        for i, (low, high) in enumerate(bounds):
            axes.barh(row, high - low, left=low, height=0.7, color=SHADES[i % 2], linewidth=0)
        axes.annotate(
            f"{len(bounds)} split{'s' * (len(bounds) > 1)} of {bounds[0][1] - bounds[0][0]}" if bounds else "empty",
            (seq_len, row),
            textcoords="offset points",
            xytext=(5, -4),
        )
    axes.set_yticks(range(len(seq_lens)), [f"{n} tokens" for n in seq_lens])
    axes.invert_yaxis()
    axes.set_xlim(0, max(seq_lens, default=1) * 1.14)
    alone = "from its own length alone" if plan.batch_invariant else f"in the bucket of {plan.num_seqs} sequences"
    axes.set_xlabel(f"tokens: each sequence's split tree, {alone}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
