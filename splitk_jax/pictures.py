"""`splitk-jax explain --plot`: a plan's decision as a picture. Needs matplotlib."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from splitk_jax.plan import DecodePlan

BATCHES = (1, 4, 16, 64)
CONTEXTS = tuple(1 << n for n in range(7, 18))
RAGGED = (131072, 65536, 40000, 16384, 6000, 1500)
"""Tokens of the sequences whose trees are drawn."""

SHADES = ("#4477aa", "#88bbdd")
"""Splits in turn; apart from one another without their colours, too."""


def plot_plan(plan: DecodePlan, path: str, seq_lens: Sequence[int] = RAGGED) -> None:
    """Draws active splits and CTAs by context and batch, and the split trees of a ragged batch to scale.

    Args:
      plan: the decision.
      path: of the PNG; on white, so that dark pages show it too.
      seq_lens: tokens of each sequence of the ragged batch.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, 7.5), layout="constrained", facecolor="white"
    )
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.1))
    contexts = [n for n in CONTEXTS if n <= plan.max_tokens]
    active = [int(plan.edges(np.int64(n)).stop) for n in contexts]
    target = "no target" if plan.policy.target is None else plan.policy.target.name
    figure.suptitle(
        f"{target}: {plan.num_q_heads}/{plan.num_kv_heads} heads of {plan.head_dim}, {plan.policy.rule},"
        f" up to {plan.num_splits} splits"
    )
    _draw_splits(figure.add_subplot(grid[0, 0]), contexts, active)
    _draw_ctas(figure.add_subplot(grid[0, 1]), plan, contexts, active)
    _draw_trees(figure.add_subplot(grid[1, :]), plan, [n for n in seq_lens if n <= plan.max_tokens])
    figure.savefig(path, dpi=130)


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


def _draw_ctas(axes: Any, plan: DecodePlan, contexts: list[int], active: list[int]) -> None:
    for i, batch in enumerate(BATCHES):
        ctas = [batch * splits * plan.ctas for splits in active]
        axes.plot(contexts, ctas, color=str(0.65 - 0.2 * i), marker="osD^"[i], markersize=4, label=f"batch {batch}")
    axes.axhline(plan.policy.sm_count, color="#cc3311", linestyle="--", linewidth=1)
    axes.annotate(
        f"{plan.policy.sm_count} SMs", (contexts[0], plan.policy.sm_count), textcoords="offset points", xytext=(2, 4)
    )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("CTAs of work, a split each")
    axes.legend(fontsize="small")
    _tokens_axis(axes)


def _draw_trees(axes: Any, plan: DecodePlan, seq_lens: list[int]) -> None:
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
    axes.set_xlabel("tokens: each sequence's split tree, from its own length alone")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
