"""`splitk-jax explain --plot`: a plan's decision as a picture. Needs matplotlib."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from splitk_jax.plan import DecodePlan

LONGEST = 131072
"""Tokens that the pictures go to, where a plan was not made for fewer."""

RAGGED = (1, 0.5, 0.3, 0.125, 0.045, 0.012)
"""The sequences whose trees are drawn, in longest ones."""

SHADES = ("#4477aa", "#88bbdd")
"""Splits in turn; apart from one another without their colours, too."""

MARKERS = "osD^v"
"""Of each batch that a report shows."""


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
    contexts = [*(1 << n for n in range(7, longest.bit_length()) if 1 << n < longest), longest]
    target = "no target" if plan.policy.target is None else plan.policy.target.name
    figure.suptitle(
        f"{target}: {plan.num_q_heads}/{plan.num_kv_heads} heads of {plan.head_dim}, {plan.policy.rule},"
        f" up to {plan.num_splits} splits"
    )
    _draw_splits(figure.add_subplot(grid[0, 0]), contexts, _active(plan, contexts))
    _draw_ctas(figure.add_subplot(grid[0, 1]), plan, contexts)
    _draw_trees(figure.add_subplot(grid[1, :]), plan, seq_lens)
    figure.savefig(path, dpi=130)


def _active(plan: DecodePlan, contexts: list[int]) -> list[int]:
    return [int(plan.edges(np.int64(n)).stop) for n in contexts]


def _tokens_axis(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    axes.set_xlabel("context, tokens")
    axes.grid(color="0.9")


def _draw_splits(axes: Any, contexts: list[int], active: list[int]) -> None:
    axes.step(contexts, active, where="post", color=SHADES[0], linewidth=2)
    axes.scatter(contexts, active, color=SHADES[0], s=14)
    axes.set_ylabel("active splits of one sequence")
    axes.set_ylim(bottom=0)
    _tokens_axis(axes)


def _draw_ctas(axes: Any, plan: DecodePlan, contexts: list[int]) -> None:
    batches = plan.report_batches
    for i, batch in enumerate(batches):
        # Of a rule that reads the batch, this batch's own tree.
        own = replace(plan, num_splits=plan.splits_at(batch))
        ctas = [batch * splits * plan.ctas for splits in _active(own, contexts)]
        grey = 0.55 * (1 - i / len(batches))
        axes.plot(contexts, ctas, color=str(grey), marker=MARKERS[i], markersize=4, label=f"batch {batch}")
    axes.axhline(plan.policy.sm_count, color="#cc3311", linestyle="--", linewidth=1)
    axes.annotate(
        f"{plan.policy.sm_count} SMs", (contexts[0], plan.policy.sm_count), textcoords="offset points", xytext=(2, 4)
    )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("CTAs of work, a split each")
    axes.legend(fontsize="small")
    _tokens_axis(axes)


def _draw_trees(axes: Any, plan: DecodePlan, seq_lens: Sequence[int]) -> None:
    for row, seq_len in enumerate(seq_lens):
        bounds = [(low, high) for low, high in plan.split_bounds(seq_len) if high > low]
        for i, (low, high) in enumerate(bounds):
            axes.barh(row, high - low, left=low, height=0.7, color=SHADES[i % 2])
        axes.annotate(
            f"{len(bounds)} splits of {bounds[0][1] - bounds[0][0]}" if bounds else "empty",
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
