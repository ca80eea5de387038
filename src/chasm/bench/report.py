"""Results for people and programs: CSV, Markdown, tables on a terminal."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chasm.common.files import write_text
from chasm.common.tables import markdown_table, print_table

Row = dict[str, Any]
NUMBERS = ("times_literal", "times_floor", "peak_mib", "ratio", "share", "forward_ms", "calls")
TITLES = {
    "shape": "shape",
    "dtype": "dtype",
    "mode": "mode",
    "mixer": "mixer",
    "form": "form",
    "layout": "layout",
    "time_ms": "ms",
    "times_literal": "x literal",
    "times_floor": "x floor",
    "peak_mib": "MiB",
    "error": "error",
}
LEGEND = """\
ms: median (CPU: fastest; there only ratios mean something). x literal: how many times faster than the paper-literal \
eager block of the same dtype and pass (of a graph too: torch's matrix exponential waits for the host, no graph \
holds it). x floor: how many times the time of moving the least number of maps. MiB: peak above the inputs. error: \
relative to float64, of the output / the largest of the gradients."""


def cell(field: str, row: Row) -> str:
    value = row.get(field)
    if field == "shape" and value is not None:
        return "x".join(map(str, value))
    if field == "time_ms":
        return significant(value) if value is not None else row.get("note", "-")
    if field == "error":
        if value is None:
            return "-"
        gradient = row.get("grad_error")
        return f"{value:.0e} / {gradient:.0e}" if row.get("worst_gradient") else f"{value:.0e}"
    if value is None:
        return "-"
    if field == "share":
        return f"{100 * value:.1f} %"
    if field == "times_literal":
        return f"{value:.1f}x"
    if field == "times_floor":
        return f"{value:.1f}"
    if field == "peak_mib":
        return f"{value:,.0f}"
    if isinstance(value, float):
        return significant(value)
    return str(value)


def significant(value: float) -> str:
    """Three digits that count."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def markdown(rows: Sequence[Row], titles: dict[str, str]) -> str:
    """Return rows as a Markdown table; `titles` names the fields that are shown, and their columns."""
    return markdown_table(list(titles.values()), [[cell(field, row) for field in titles] for row in rows])


def header(title: str, facts: dict[str, str]) -> str:
    return "\n".join([f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items())])


def write(out: Path | None, text: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """OUT.md and OUT.csv."""
    if out is None:
        return
    write_text(out.with_suffix(".md"), text.rstrip() + "\n")
    table = io.StringIO()
    values = [[_plain(row.get(c)) for c in columns] for row in rows]
    csv.writer(table, lineterminator="\n").writerows([columns, *values])
    write_text(out.with_suffix(".csv"), table.getvalue())


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def show(rows: Sequence[Row], titles: dict[str, str], caption: str = "") -> None:
    """Print rows as a table; one with a note is red."""
    cells = [[cell(field, row) for field in titles] for row in rows]
    right = [title for field, title in titles.items() if field in NUMBERS]
    marked = [i for i, row in enumerate(rows) if row.get("note")]
    print_table(list(titles.values()), cells, title=caption, right=right, marked=marked)
