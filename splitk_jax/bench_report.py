"""What a run of `splitk-jax bench` found, and how it is shown: a line a cell, tables, a plot."""

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax

from splitk_jax import report
from splitk_jax.plan import DecodePlan, versions
from splitk_jax.shapes import KV_BYTES, Cell

if TYPE_CHECKING:
    from splitk_jax.bench import Run

OURS = "splitk_jax"
PINNED_PREFIX = "pinned "

PINNED = (1, 2, 4, 8, 16, 32, 64)
"""Split counts that the suite invariance compares the plan's tree with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one system on one cell; the fields are those of the JSON document."""

    status: str
    reason: str | None = None
    choice: str | None = None
    error: float | None = None
    queued_us: float | None = None
    kernel_us: float | None = None
    kernels: dict[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The time that reading a cell's bytes takes, or why there is none."""

    queued_us: float | None = None
    kernel_us: float | None = None
    launch: str | None = None
    reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Row:
    """One cell of a run; it fills as systems answer."""

    cell: Cell
    skipped: str | None = None
    num_pages: int | None = None
    layers: int | None = None
    pools: int | None = None
    plan: DecodePlan | None = None
    floor: Floor = Floor()
    results: dict[str, Result] = field(default_factory=dict)

    def us(self, system: str) -> float | None:
        """Its queued time in microseconds a layer; None where it has none."""
        result = self.results.get(system)
        return None if result is None else result.queued_us

    def over(self, system: str, other: float | None) -> float | None:
        """Its queued time over another time in microseconds."""
        us = self.us(system)
        return None if us is None or other is None else us / other

    def tb_per_s(self, system: str) -> float | None:
        """KV that it reads a second, in TB."""
        us = self.us(system)
        return None if us is None else self.cell.kv_bytes / us / 1e6

    def best(self, systems: Iterable[str]) -> str | None:
        """The fastest of some systems; None when none has a time."""
        timed = {name: us for name in systems if (us := self.us(name)) is not None}
        return min(timed, key=lambda name: timed[name], default=None)

    @property
    def pinned(self) -> list[str]:
        """The systems that are the op with a pinned count."""
        return [name for name in self.results if name.startswith(PINNED_PREFIX)]

    @property
    def cost(self) -> float | None:
        """Queued time of the plan's tree over the best pinned count's, less 1."""
        best = self.best(self.pinned)
        over = None if best is None else self.over(OURS, self.us(best))
        return None if over is None else over - 1


def number(value: float | None) -> str:
    """Three figures: 4.02, 31.8, 120; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}" if value >= 0.995 else f"{value:.2f}"


def ratio(value: float | None) -> str:
    """1.05x; a dash for None."""
    return "-" if value is None else f"{value:.2f}x"


def cost(value: float | None) -> str:
    """+2.0 %; a dash for None."""
    return "-" if value is None else f"{100 * value:+.1f} %"


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def line(run: "Run", row: Row) -> str:
    """One cell in one line, so that a run that is cut leaves its figures."""
    cell = row.cell
    if row.skipped is not None:
        return f"{cell.name}: skipped: {row.skipped}"
    parts = [f"{cell.name} {report.si_bytes(cell.kv_bytes)}"]
    if row.floor.queued_us is not None:
        parts.append(f"floor {number(row.floor.queued_us)} ({row.floor.launch})")
    for name, result in row.results.items():
        if result.status == "ok":
            over = row.over(name, row.floor.queued_us if name == OURS else row.us(OURS))
            parts.append(f"{name} {number(result.queued_us)} K {number(result.kernel_us)} {ratio(over)}")
        elif result.status != "missing":
            parts.append(f"{name} {result.status}: {result.reason}")
    return " | ".join(parts)


def head(run: "Run") -> str:
    """What runs, and on what."""
    target = run.policy.target
    rows = [
        ("device", run.device.device_kind),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions().items())),
        ("target", "-" if target is None else f"{target.name} ({target.source})"),
        ("policy", f"{run.policy.rule}, backend {run.policy.backend}"),
        ("suite", f"{run.options.suite}, {len(run.options.cells)} cells"),
    ]
    for name, facts in run.peers.items():
        missing, version = facts["missing"], facts["version"]
        rows.append((name, f"{facts['title']} ({missing or version or 'version unknown'})"))
    return "\n".join(f"{key:<11} {value}" for key, value in rows) + "\n"


def tables(run: "Run") -> str:
    """The run as tables, with the reason of every dash."""
    parts: list[Any] = [report.table("plans", *_plan_rows(run), left=1)]
    if run.options.suite == "invariance":
        parts.append(report.table("queued us a layer, and the cost of one fixed tree", *_cost_rows(run), left=1))
    else:
        parts.append(report.table("us a layer; ratio: the best peer's queued time over ours", *_own_rows(run), left=1))
        if run.peers:
            parts.append(report.table("peers: queued us a layer, and over ours", *_peer_rows(run), left=1))
    if any(row.cell.quantised for row in run.rows):
        title = "quantised: queued us a layer, and bfloat16's at as many tokens over it"
        parts.append(report.table(title, *_quantised_rows(run), left=1))
    return "\n".join([report.render(*parts), *_summary(run), *_reasons(run)])


def _plan_rows(run: "Run") -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    header = ("cell", "q heads", "KV heads", "head dim", "splits", "plan", "pages", "pools")
    rows = []
    for row in run.rows:
        heads, plan = row.cell.heads, row.plan
        own = (None, None) if plan is None else (plan.num_splits, plan.fingerprint())
        shape = (heads.num_q_heads, heads.num_kv_heads, heads.head_dim)
        rows.append((row.cell.name, *shape, *own, row.num_pages, row.pools))
    return header, rows


def _own_rows(run: "Run") -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    header = (
        "shape",
        "batch",
        "context",
        "page",
        "KV",
        "floor",
        "queued",
        "kernel",
        "TB/s",
        "floor x",
        "best",
        "ratio",
    )
    rows = []
    for row in run.rows:
        cell, result, us = row.cell, row.results.get(OURS), row.us(OURS)
        best = row.best(run.peers)
        rows.append(
            (
                cell.model,
                cell.batch,
                cell.span,
                cell.page_size,
                report.si_bytes(cell.kv_bytes),
                number(row.floor.queued_us),
                "skipped" if row.skipped else "-" if result is None else result.status if us is None else number(us),
                number(None if result is None else result.kernel_us),
                number(row.tb_per_s(OURS)),
                ratio(row.over(OURS, row.floor.queued_us)),
                best,
                ratio(None if best is None else row.over(best, us)),
            )
        )
    return header, rows


def _peer_rows(run: "Run") -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    rows = []
    for row in run.rows:
        shown = []
        for name in run.peers:
            result = row.results.get(name)
            if result is not None and result.status == "ok":
                shown.append(f"{number(result.queued_us)} {ratio(row.over(name, row.us(OURS)))}")
            else:
                shown.append("-" if result is None or result.status == "missing" else result.status)
        rows.append((row.cell.name, number(row.us(OURS)), *shown))
    return ("cell", "ours", *run.peers), rows


def _quantised_rows(run: "Run") -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """A row for each batch, a column for each dtype."""
    shown: dict[Cell, dict[str, str]] = {}
    for row in run.rows:
        if row.cell.quantised:
            text = f"{number(row.us(OURS))} {ratio(run.faster(row))}"
            shown.setdefault(replace(row.cell, kv_dtype="bfloat16"), {})[row.cell.kv_dtype] = text
    wide = {row.cell: number(row.us(OURS)) for row in run.rows}
    dtypes = [dtype for dtype in KV_BYTES if dtype != "bfloat16"]
    rows = [
        (cell.name, report.si_bytes(cell.kv_bytes), wide.get(cell), *(texts.get(dtype) for dtype in dtypes))
        for cell, texts in shown.items()
    ]
    return ("cell", "KV in bfloat16", "bfloat16", *dtypes), rows


def _cost_rows(run: "Run") -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    rows = []
    for row in run.rows:
        shown = [number(row.us(f"{PINNED_PREFIX}{n}")) for n in PINNED]
        best = row.best(row.pinned)
        own = "skipped" if row.skipped else number(row.us(OURS))
        size = report.si_bytes(row.cell.kv_bytes)
        rows.append(
            (
                row.cell.name,
                size,
                own,
                *shown,
                None if best is None else best.removeprefix(PINNED_PREFIX),
                cost(row.cost),
            )
        )
    return ("cell", "KV", "plan", *map(str, PINNED), "best", "cost"), rows


def _summary(run: "Run") -> list[str]:
    """Means over the cells that have both figures."""
    lines = []
    costs = {row.cell.name: row.cost for row in run.rows if row.cost is not None}
    if costs:
        worst = max(costs, key=lambda name: costs[name])
        mean = geomean(1 + value for value in costs.values())
        assert mean is not None
        lines.append(
            f"cost of one fixed tree over the best count of each cell: geomean {cost(mean - 1)}, worst"
            f" {cost(costs[worst])} ({worst}), {len(costs)} cells"
        )
    for dtype in KV_BYTES:
        faster = [x for row in run.rows if row.cell.kv_dtype == dtype and (x := run.faster(row)) is not None]
        if faster:
            lines.append(
                f"{dtype} at as many tokens as bfloat16: geomean {ratio(geomean(faster))} faster, least"
                f" {ratio(min(faster))}, {len(faster)} cells"
            )
    over = [x for row in run.rows if (x := row.over(OURS, row.floor.queued_us)) is not None]
    if over:
        lines.append(f"over the floor: geomean {ratio(geomean(over))}, worst {ratio(max(over))}, {len(over)} cells")
    faster = [
        x
        for row in run.rows
        if (best := row.best(run.peers)) is not None and (x := row.over(best, row.us(OURS))) is not None
    ]
    if faster:
        ahead = sum(x > 1 for x in faster)
        lines.append(
            f"the best peer over ours: geomean {ratio(geomean(faster))}, least {ratio(min(faster))};"
            f" faster than every peer in {ahead} of {len(faster)} cells"
        )
    return lines


def _reasons(run: "Run") -> list[str]:
    """Why a figure is not there, each reason once."""
    cells: dict[str, list[str]] = {}
    for row in run.rows:
        if row.skipped is not None:
            cells.setdefault(f"skipped: {row.skipped}", []).append(row.cell.name)
        elif row.floor.reason is not None and run.options.suite != "invariance":
            cells.setdefault(f"no floor: {row.floor.reason}", []).append(row.cell.name)
        for name, result in row.results.items():
            if result.reason is not None:
                cells.setdefault(f"{name} {result.status}: {result.reason}", []).append(row.cell.name)
    return [
        f"{reason} [{'every cell' if len(names) == len(run.rows) else ', '.join(names)}]"
        for reason, names in cells.items()
    ]


def plot(run: "Run", path: str) -> None:
    """Draws time over the floor by bytes of KV, one line a system; queued time itself where there is no floor."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    floors = any(row.floor.queued_us is not None for row in run.rows)
    for name in dict.fromkeys(name for row in run.rows for name in row.results):
        points: dict[float, list[float]] = {}
        for row in run.rows:
            y = row.over(name, row.floor.queued_us) if floors else row.us(name)
            if y is not None:
                points.setdefault(row.cell.kv_bytes / 1e6, []).append(y)
        if points:
            # The line goes through the mean of the cells of one size; each cell is a dot.
            own = {"color": "black", "linewidth": 2} if name == OURS else {"linewidth": 1}
            (drawn,) = axes.plot(sorted(points), [geomean(points[x]) for x in sorted(points)], label=name, **own)
            dots = [(x, y) for x, ys in points.items() for y in ys]
            axes.scatter(*zip(*dots, strict=True), s=12, color=drawn.get_color())
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("KV read by a layer, MB")
    axes.set_ylabel("queued time over the read floor" if floors else "queued time, us a layer")
    if floors:
        axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_title(f"{run.options.suite}, {run.device.device_kind}, JAX {jax.__version__}")
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    figure.savefig(path, dpi=130)
