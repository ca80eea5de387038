"""What a report is made of: sections with text, tables and pictures."""

from dataclasses import dataclass, field

SOURCE_COLUMN = "source"  # tells the paper's lines from ours; names to the left of it hold for both lines


@dataclass(frozen=True)
class TableCell:
    """One cell of a table."""

    text: str
    kind: str = ""  # best, paper, name, win or loss


def row_kind(arm: str) -> str:
    """Return the kind of the line of an arm: that of CHASM stands out."""
    return "focus" if arm == "chasm" else ""


def verdict_cell(text: str, verdict: str) -> TableCell:
    """Return a cell that is coloured if the verdict is a win or a loss."""
    return TableCell(text, verdict if verdict in ("win", "loss") else "")


@dataclass(frozen=True)
class TableRow:
    """One line of a table."""

    cells: list[TableCell]
    kind: str = ""  # focus or reference
    starts_block: bool = False  # a line is drawn above it


def table_row(*cells: str | TableCell, kind: str = "", starts_block: bool = False) -> TableRow:
    """Return a line of cells, each of which may be given as its text alone."""
    return TableRow([TableCell(c) if isinstance(c, str) else c for c in cells], kind, starts_block)


@dataclass(frozen=True)
class Table:
    """A table with a title above and a note below."""

    title: str
    columns: list[str]
    rows: list[TableRow]
    note: str = ""
    is_text: bool = False  # text rather than numbers: everything to the left
    groups: list[tuple[str, int]] = field(default_factory=list)  # titles above the columns, with how many each spans
    file: str = ""  # written beside the page under this name, as LaTeX and CSV


@dataclass(frozen=True)
class Picture:
    """An image that is part of the page."""

    source: str  # a data URI
    alt: str
    caption: str
    files: dict[str, bytes] = field(default_factory=dict)  # also written beside the page, by name


@dataclass
class Section:
    """A heading with what stands below it."""

    title: str
    text: list[str] = field(default_factory=list)
    points: list[str] = field(default_factory=list)
    items: list[Table | Picture] = field(default_factory=list)
