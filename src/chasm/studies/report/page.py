"""A report of a study, or of a few runs: one HTML file that needs nothing else, the same in Markdown, and CSV.

`write_report` takes what `chasm.studies.collect` returns, and `report_runs` first brings plain run folders into that
form. "win" and "loss" come from `statistics` alone.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chasm import __version__
from chasm.common.files import expanded, holds, require_replaceable, write_bytes, write_text
from chasm.common.tables import code, csv_text, escaped, markdown_table
from chasm.studies.records import Results
from chasm.studies.report import sections
from chasm.studies.report.elements import Picture, Section, Table
from chasm.studies.report.exports import csv_table, flat_columns, latex_table
from chasm.studies.report.harmonisation import harmonisation
from chasm.studies.report.place import place_section
from chasm.studies.report.runs import as_results
from chasm.studies.report.sampling import sampling_section
from chasm.studies.report.sizes import sizes_section

MARK = b"<footer>Made by <code>"  # in every page


@dataclass
class ReportPage:
    """Everything that a report shows."""

    title: str
    question: str
    facts: list[str]
    notices: list[str]
    sections: list[Section]
    command: str
    version: str = __version__


def write_report(
    results: Results, folder: str | Path, *, root: str | Path | None = None, command: str | None = None
) -> Path:
    """Write report.html, .md, .csv and figures.

    Args:
        results: the results of a study.
        folder: the folder to write to, or the name of an .html file, beside which the other files are written.
        root: folder of the runs that the results were collected from. Curves, pictures and what CHASM learned are read
            there. Without it the report has numbers only.
        command: the command that the report names as its origin; by default that of a study's report.

    Returns:
        The HTML file.
    """
    folder = expanded(folder)
    page = folder if folder.suffix == ".html" else folder / "report.html"
    report = _report(results, None if root is None else expanded(root), command)
    write_page(report, page, prefix=f"{page.stem}-")
    write_text(page.with_suffix(".csv"), _csv(sections.score_lines(results)))
    write_text(page.with_name(f"{page.stem}-differences.csv"), _csv([asdict(c) for c in results.comparisons]))
    return page


def write_page(report: ReportPage, page: Path, prefix: str = "") -> None:
    """Write a page as HTML and Markdown, and the files of its tables and (with a prefix) its pictures beside it."""
    beside: dict[Path, bytes] = {}
    for item in (item for section in report.sections for item in section.items):
        if isinstance(item, Picture):
            beside |= {page.with_name(prefix + name): content for name, content in item.files.items()}
        elif item.file:
            beside[page.with_name(f"{item.file}.tex")] = (latex_table(item) + "\n").encode()
            beside[page.with_name(f"{item.file}.csv")] = csv_table(item).encode()
    require_replaceable(page, lambda path: holds(path, MARK))
    for file in (*(page.with_suffix(suffix) for suffix in (".md", ".csv", ".json")), *beside):
        require_replaceable(file, lambda _: page.exists())  # of an earlier report
    write_text(page, _html(report, prefix))
    write_text(page.with_suffix(".md"), _markdown(report))
    for file, content in beside.items():
        write_bytes(file, content)


def report_runs(
    runs: Mapping[str, str | Path] | Sequence[str | Path],
    out: str | Path,
    title: str,
    *,
    question: str = "",
    command: str = "report_runs",
) -> Path:
    """Write the report of finished run folders.

    A folder needs metrics.json. The report also uses config.yaml, environment.json, log.jsonl, examples.npz and
    weights.safetensors if they are there. So a method without training can be shown beside the others.

    Args:
        runs: folders by the name of the method; without names, those in their configs are taken.
        out: a folder, or the name of an .html file.
        title: title of the page.
        question: the question that the runs answer, printed below the title.
        command: the command that the report names as its origin.

    Returns:
        The HTML file.
    """
    return write_report(as_results(runs, title, question), out, root=".", command=command)


def _report(results: Results, root: Path | None, command: str | None) -> ReportPage:
    study = results.study
    where = "" if root is None else f" --out {shlex.quote(str(root))}"
    default = f"chasm report {study.name} --scale {results.scale} --protocol {results.protocol}{where}"
    shown = [
        sections.summary(results),
        *(place_section(results, setting, host, root) for setting, host in results.places()),
        sections.falsification(results),
        sampling_section(results),
        sizes_section(results, root),
        sections.printed_gains(results),
        sections.selections(results),
        sections.learned(results, root),
        harmonisation(results, root),
        sections.unfinished(results),
        sections.protocol(results),
        sections.runs(results),
    ]
    return ReportPage(
        study.title,
        study.question,
        sections.facts(results),
        sections.notices(results),
        [section for section in shown if section is not None],
        command or default,
    )


def _html(report: ReportPage, prefix: str) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Of the template's tests, only `columns is defined` meets an absent name; everything else must be there.
    loader = Environment(
        loader=PackageLoader("chasm.studies.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return loader.get_template("page.html.j2").render(report=report, prefix=prefix) + "\n"


def _markdown(report: ReportPage) -> str:
    """Return the text and tables; only the HTML has figures."""
    question = [escaped(report.question), ""] if report.question else []
    lines = [f"# {escaped(report.title)}", "", *question, escaped(" · ".join(report.facts)), ""]
    for notice in report.notices:
        lines += [f"> **Note.** {escaped(notice)}", ""]
    for section in report.sections:
        lines += [f"## {escaped(section.title)}", "", *(part for line in section.text for part in (escaped(line), ""))]
        if section.points:
            lines += [*(f"- {escaped(point)}" for point in section.points), ""]
        for item in section.items:
            if isinstance(item, Table):
                lines += _markdown_table(item)
    return "\n".join([*lines, f"Made by {code(report.command)}, chasm {report.version}.", ""])


def _markdown_table(table: Table) -> list[str]:
    lines = [f"**{escaped(table.title)}**", ""] if table.title else []
    rows = [
        [f"**{escaped(c.text)}**" if c.kind == "best" else escaped(c.text) for c in row.cells] for row in table.rows
    ]
    columns = [escaped(column) for column in flat_columns(table)]
    lines.append(markdown_table(columns, rows, right=[] if table.is_text else columns[1:]))
    return [*lines, "", *([escaped(table.note), ""] if table.note else [])]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(k for row in rows for k in row))
    return csv_text(columns, [[row.get(c) for c in columns] for row in rows])
