"""Results as CSV files, Markdown pages and tables on a terminal."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chasm.common.files import holds, require_replaceable, write_text
from chasm.common.tables import csv_text, markdown_table, print_table

Row = dict[str, Any]
NUMBERS = ("times_literal", "times_floor", "peak_mib", "ratio", "share", "forward_ms", "calls")
# Titles of the columns whose field is not its own title.
_TITLES = {
    "time_ms": "ms",
    "times_literal": "x literal",
    "times_floor": "x floor",
    "peak_mib": "MiB",
    "ratio": "over empty slots",
    "forward_ms": "of it forward",
    "range": "over",
    "largest": "largest that ran",
}
LEGEND = """\
ms: median time (on a CPU the fastest; there only ratios are meaningful). x literal: how many times faster than the \
paper-literal eager block of the same dtype and pass (also for graph rows, since torch's matrix exponential waits for \
the host and cannot be captured). x floor: time divided by the time to move the maps through memory. MiB: peak memory \
above the inputs. error: relative to float64, of the output / the largest of the gradients."""


def titles(*fields: str, **special: str) -> dict[str, str]:
    """Return the titles of the columns of a table by their fields.

    >>> titles("mixer", "time_ms", mixer="slots")
    {'mixer': 'slots', 'time_ms': 'ms'}
    """
    return {field: special.get(field) or _TITLES.get(field, field) for field in fields}


def cell(field: str, row: Row) -> str:
    """Return the text of a field in a table, "-" if the row does not have it.

    >>> cell("time_ms", {"time_ms": 12.3456})
    '12.3'
    """
    value = row.get(field)
    if value is None:
        return str(row.get("note", "-")) if field == "time_ms" else "-"
    if field == "error":
        return f"{value:.0e}" + (f" / {row['grad_error']:.0e}" if row.get("worst_gradient") else "")
    if field in _FORMATS:
        return _FORMATS[field](value)
    return significant(value) if isinstance(value, float) else str(value)


def significant(value: float) -> str:
    """Return a number with about three significant digits.

    >>> [significant(x) for x in (0.12345, 12.345, 1234.5)]
    ['0.123', '12.3', '1234']
    """
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


_FORMATS: dict[str, Callable[[Any], str]] = {
    "shape": lambda shape: "x".join(map(str, shape)),
    "time_ms": significant,
    "share": lambda share: f"{100 * share:.1f} %",
    "times_literal": "{:.1f}x".format,
    "times_floor": "{:.1f}".format,
    "peak_mib": "{:,.0f}".format,
}


def markdown(rows: Sequence[Row], columns: dict[str, str]) -> str:
    """Return rows as a Markdown table."""
    return markdown_table(list(columns.values()), [[cell(field, row) for field in columns] for row in rows])


def header(title: str, facts: dict[str, str]) -> str:
    """Return the first lines of a Markdown page."""
    return "\n".join([f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items())])


def require_replaceable_pages(out: Path | None) -> None:
    """Raise a ValueError if OUT.md or OUT.csv is there and not from an earlier measurement."""
    if out is not None:
        page = out.with_suffix(".md")
        require_replaceable(page, lambda path: holds(path, b"\n- command: "))
        require_replaceable(out.with_suffix(".csv"), lambda _: page.exists())


def write(out: Path | None, text: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Write OUT.md and OUT.csv.

    Args:
        out: path of both without its suffix; None writes nothing.
        text: content of the page.
        rows: rows of the CSV file.
        columns: fields of the CSV file.

    Raises:
        OSError: if a file cannot be written.
    """
    if out is None:
        return
    write_text(out.with_suffix(".md"), text.rstrip() + "\n")
    write_text(out.with_suffix(".csv"), csv_text(columns, [[_plain(row.get(c)) for c in columns] for row in rows]))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def show(rows: Sequence[Row], columns: dict[str, str], caption: str = "") -> None:
    """Print rows as a table, those with a note in red.

    Args:
        rows: rows of the table.
        columns: title of each column, by the name of its field.
        caption: printed above the table.
    """
    cells = [[cell(field, row) for field in columns] for row in rows]
    right = [title for field, title in columns.items() if field in NUMBERS]
    marked = [i for i, row in enumerate(rows) if row.get("note")]
    print_table(list(columns.values()), cells, title=caption, right=right, marked=marked)
