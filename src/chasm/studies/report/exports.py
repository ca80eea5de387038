"""A table of a report as files for a manuscript: LaTeX with booktabs, and CSV."""

import re

from chasm.common.tables import csv_text
from chasm.studies.report.elements import SOURCE_COLUMN, Table, TableCell

SPREAD = " ± "
MAX_LETTERS = 24  # of text in one line
SHRUNK = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # to the width of the page, if wider
_OWN_NUMBER = re.compile(r"^(Table \d+( \(\w\))?|Appendix)\. ")
_SYMBOLS = {
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "×": r"$\times$",
    "→": r"$\rightarrow$",
    "Δ": r"$\Delta$",
    "−": "$-$",
    "–": "--",
    "†": r"$^\dagger$",
    "ℓ": r"$\ell$",
    "“": "``",
    "”": "''",
}


def latex_table(table: Table) -> str:
    """Return a table environment that needs the package booktabs.

    >>> from chasm.studies.report.elements import TableRow
    >>> rows = [TableRow([TableCell("CHASM"), TableCell("28.68 ± 0.74", "best")])]
    >>> print(latex_table(Table("CC359 ×8", ["Mixer", "PSNR"], rows, file="table-1")))
    % needs \\usepackage{booktabs} and \\usepackage{graphicx}
    \\begin{table}
    \\centering
    \\caption{CC359 $\\times$8}
    \\label{tab:table-1}
    \\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%
    \\begin{tabular}{lr}
    \\toprule
    Mixer & PSNR \\\\
    \\midrule
    CHASM & \\textbf{28.68}{\\tiny$\\pm$0.74} \\\\
    \\bottomrule
    \\end{tabular}}
    \\end{table}
    """
    title = _OWN_NUMBER.sub("", table.title) or table.file.capitalize()  # LaTeX numbers tables itself
    lines = [r"% needs \usepackage{booktabs} and \usepackage{graphicx}", r"\begin{table}", r"\centering"]
    lines += [rf"\caption{{{_escaped(title)}}}", rf"\label{{tab:{table.file}}}", SHRUNK]
    lines += [rf"\begin{{tabular}}{{{_alignment(table)}}}", r"\toprule"]
    if table.groups:
        lines += _group_lines(table.groups)
    lines += [_line([_escaped(column) for column in table.columns]), r"\midrule"]
    for i, row in enumerate(table.rows):
        lines += [r"\midrule"] * (row.starts_block and i > 0)
        lines.append(_line([_cell(cell) for cell in row.cells]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table}"])


def _alignment(table: Table) -> str:
    """Return the columns of a tabular: text to the left, long text broken into lines, numbers to the right."""
    columns = len(table.columns)
    if not table.is_text:
        names = table.columns.index(SOURCE_COLUMN) + 1 if SOURCE_COLUMN in table.columns else 1
        return "l" * names + "r" * (columns - names)
    longest = [max(len(row.cells[i].text) for row in table.rows) for i in range(columns)]
    return "".join("l" if n <= MAX_LETTERS else r"p{0.3\linewidth}" for n in longest)


def csv_table(table: Table) -> str:
    """Return the cells as CSV. A column with spreads becomes two, a dash an empty cell, and names are repeated.

    >>> from chasm.studies.report.elements import TableRow
    >>> values = {"CHASM": "28.68 ± 0.74", "GFNet": "–"}
    >>> rows = [TableRow([TableCell(name), TableCell(value)]) for name, value in values.items()]
    >>> print(csv_table(Table("", ["Mixer", "PSNR"], rows)), end="")
    Mixer,PSNR,PSNR std
    CHASM,28.68,0.74
    GFNet,,
    """
    columns = flat_columns(table)
    with_spread = [any(SPREAD in row.cells[i].text for row in table.rows) for i in range(len(columns))]
    titles = [t for c, two in zip(columns, with_spread, strict=True) for t in ([c, f"{c} std"] if two else [c])]
    rows: list[list[str]] = []
    names = table.columns.index(SOURCE_COLUMN) if SOURCE_COLUMN in table.columns else 0
    above = [TableCell("")] * names
    for row in table.rows:
        values: list[str] = []
        above = [cell if cell.text else previous for cell, previous in zip(row.cells, above, strict=False)]
        for cell, two in zip([*above, *row.cells[names:]], with_spread, strict=True):
            mean, _, spread = cell.text.partition(SPREAD)
            values += [_plain(mean), _plain(spread)] if two else [_plain(cell.text)]
        rows.append(values)
    return csv_text(titles, rows)


def flat_columns(table: Table) -> list[str]:
    """Return the titles of the columns, each with that of its group in front."""
    above = [title for title, width in table.groups for _ in range(width)] or [""] * len(table.columns)
    return [" ".join(filter(None, pair)) for pair in zip(above, table.columns, strict=True)]


def _plain(text: str) -> str:
    return "" if text == "–" else text.replace("−", "-")


def _group_lines(groups: list[tuple[str, int]]) -> list[str]:
    cells, rules, first = [], [], 1
    for title, width in groups:
        cells.append(rf"\multicolumn{{{width}}}{{c}}{{{_escaped(title)}}}")
        if title:
            rules.append(rf"\cmidrule(lr){{{first}-{first + width - 1}}}")
        first += width
    return [_line(cells), " ".join(rules)]


def _line(cells: list[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _cell(cell: TableCell) -> str:
    mean, _, spread = cell.text.partition(SPREAD)
    text = rf"\textbf{{{_escaped(mean)}}}" if cell.kind == "best" else _escaped(mean)
    return text + rf"{{\tiny$\pm${_escaped(spread)}}}" if spread else text


def _escaped(text: str) -> str:
    return "".join(_SYMBOLS.get(letter, letter) for letter in text)
