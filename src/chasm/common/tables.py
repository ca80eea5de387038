"""Tables: Markdown and CSV in files, and the same cells on a terminal."""

import csv
import io
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

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


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV with a line of titles; None is an empty cell.

    >>> csv_text(["mixer", "ms"], [["a, b", None]])
    'mixer,ms\\n"a, b",\\n'
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([columns, *rows])
    return buffer.getvalue()


def escaped(text: str) -> str:
    """Return text so that Markdown shows it as it is: on one line, without tags, links, code or bold of its own.

    >>> print(escaped("a*b <script> [x](y)"))
    a\\*b \\<script> [x]\\(y)
    """
    for mark, plain in (("\\", r"\\"), ("`", r"\`"), ("*", r"\*"), ("<", r"\<"), ("](", r"]\(")):
        text = text.replace(mark, plain)
    return " ".join(text.splitlines())


def code(text: str) -> str:
    """Return text as code in Markdown, whatever backticks it has.

    >>> code("chasm report"), code("a`b")
    ('`chasm report`', '`` a`b ``')
    """
    return f"`` {' '.join(text.splitlines())} ``" if "`" in text else f"`{' '.join(text.splitlines())}`"


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
