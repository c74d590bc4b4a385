"""Tables as text, for `describe`, `explain` and the command line."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 118


def render(*parts: RenderableType) -> str:
    """Renders rich objects to plain text, no wider than `WIDTH`."""
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, color_system=None, highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[Any]], *, left: int = 1, whole: Sequence[str] = ()
) -> Table:
    """A table whose first `left` columns are text and whose others are figures, aligned right. `whole` do not fold."""
    result = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(header):
        result.add_column(column, justify="left" if i < left else "right", overflow="fold", no_wrap=column in whole)
    for row in rows:
        # Text, not str: "[policy] splits" is an origin, not markup.
        result.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    return result


def si_bytes(count: int) -> str:
    """Bytes with a decimal unit: 33.6 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
