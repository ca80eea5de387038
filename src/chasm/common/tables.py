"""Tables for people: Markdown in files, and the same cells on a terminal."""

import sys
from collections.abc import Collection, Sequence

Cells = Sequence[Sequence[str]]


def markdown_table(columns: Sequence[str], rows: Cells, *, right: Collection[str] = ()) -> str:
    """Return a Markdown table.

    Args:
        columns: the titles.
        rows: the cells of each row; a vertical bar in one is escaped.
        right: titles of the columns that are aligned to the right.

    Example:
        >>> print(markdown_table(["mixer", "ms"], [["a|b", "1.5"]], right=["ms"]))
        | mixer | ms |
        | --- | --: |
        | a\\|b | 1.5 |
    """
    lines = [columns, ["--:" if title in right else "---" for title in columns], *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def print_table(
    columns: Sequence[str],
    rows: Cells,
    *,
    title: str = "",
    right: Collection[str] = (),
    marked: Collection[int] = (),
) -> None:
    """Print a table to standard output, with colours where that is a terminal.

    Args:
        columns: the titles.
        rows: the cells of each row.
        title: a line above the table.
        right: titles of the columns that are aligned to the right and never broken.
        marked: numbers of the rows that are printed in red.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        number = name in right
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for i, row in enumerate(rows):
        table.add_row(*row, style="red" if i in marked else None)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
