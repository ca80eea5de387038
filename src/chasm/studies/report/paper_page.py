"""The claims, tables and figures of the paper on one page, each beside the results of our runs."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from chasm.common.files import expanded
from chasm.studies import paper
from chasm.studies.factors import ARMS, SETTINGS
from chasm.studies.gather import FinishedRows, gather, paired_difference
from chasm.studies.records import Falsification, data_kind
from chasm.studies.report import paper_figures, paper_tables, text
from chasm.studies.report.elements import Section, Table, TableCell, table_row
from chasm.studies.report.page import ReportPage, write_page

QUESTION = "What does the paper print, and what do runs of this package say in the same place?"


def write_paper_page(
    folders: Sequence[str | Path], out: str | Path, scale: str = "tiny", protocol: str = "default"
) -> tuple[Path, int]:
    """Write the tables and figures of the paper with the runs of all studies in some folders.

    Beside the page every table is written as LaTeX (booktabs) and CSV, and every figure as PDF and PNG.

    Args:
        folders: folders of runs, as given to `chasm study run --out`.
        out: folder of the page.
        scale: scale of the studies.
        protocol: protocol of the studies.

    Returns:
        The HTML file, and the number of finished runs that it shows or could show.

    Raises:
        FileNotFoundError: if a folder of runs is not there.
    """
    finished = gather(folders, scale, protocol)
    table_3a, falsified = paper_tables.falsification(finished)
    pictures = [paper_figures.overview(), paper_figures.qualitative(finished), paper_figures.gains(finished)]
    appendix = [
        paper_tables.seeds(finished),
        paper_tables.variants(finished, "seeds-basis"),
        paper_tables.flops(finished, scale),
        paper_tables.protocol(finished),
        paper_tables.taxonomy(),
    ]
    shown = [
        Section("Claims", items=[claims(finished, falsified)]),
        Section("Main tables", items=[paper_tables.cc359(finished), paper_tables.cross_domain(finished)]),
        Section("Figures", items=[picture for picture in pictures if picture is not None]),
        Section(
            "Mechanism", items=[table_3a, *(paper_tables.variants(finished, study) for study in ("basis", "axes"))]
        ),
        Section("Appendix", items=[*appendix]),
    ]
    runs = {(row.root, run.key): run for row in finished.rows for run in row.runs}
    where = " ".join(shlex.quote(str(folder)) for folder in folders)
    page = ReportPage(
        "CHASM: the paper and our runs",
        QUESTION,
        [f"scale {scale}", f"protocol {protocol}", f"{len(runs)} finished runs"],
        _notices(finished, scale),
        [section for section in shown if section.items],
        f"chasm report paper {where} --scale {scale} --protocol {protocol}",
    )
    path = expanded(out) / "paper.html"
    write_page(page, path)
    return path, len(runs)


def claims(finished: FinishedRows, falsified: list[Falsification]) -> Table:
    """Return the conclusions of the paper from its tables, beside what our runs say about each."""
    lines = [("CHASM has the highest mean PSNR (mIoU) of its column in Tables 1 and 2", *_columns_won(finished))]
    drop = f"{paper.FALSIFICATION['mean']['drop']:.1f} % of the gain is lost, mean of four settings"
    lines.append(("A random mask takes most of CHASM's gain (Table 3a)", drop, _drops(falsified)))
    for arm, claim in (
        ("chasm-identity", "A learned basis beats the identity (Table 3b)"),
        ("chasm-untied", "A shared basis beats an untied one (Table 3b)"),
        ("chasm-signed", "Positive gains beat signed ones (Table 3b)"),
        ("chasm-complex", "Positive gains beat complex ones (Table 3b)"),
    ):
        lines.append((claim, *_against(finished, "basis", arm, paper.BASIS)))
    for arm in paper.AXES:
        if arm != "chasm":
            lines.append((f"CH → CW beats {ARMS[arm].label} (Table 3c)", *_against(finished, "axes", arm, paper.AXES)))
    rows = [table_row(claim, TableCell(printed, "paper"), ours) for claim, printed, ours in lines]
    note = (
        "Ours is the mean paired difference in dB with its 95 % interval over test cases and seeds, and win, loss or "
        "level by that interval. A dash means that there are no finished runs."
    )
    return Table("", ["claim", "paper", "ours"], rows, note, is_text=True, file="claims")


def _notices(finished: FinishedRows, scale: str) -> list[str]:
    notices, kind = [], data_kind([run for row in finished.rows for run in row.runs])
    if not finished.rows:
        notices.append("There are no finished runs for these tables, so each of our lines is a dash.")
    if kind:
        notices.append(
            f"Our runs use {kind}: other images replace the paper's datasets. Orders and signs can be compared with "
            "the paper, but levels cannot."
        )
    notices += [f"Left out: {line}" for line in finished.left_out]
    if scale == "tiny":
        notices.append(
            "At scale tiny, toy models train for a few steps. Our numbers only show that the software works."
        )
    return notices


def _columns_won(finished: FinishedRows) -> tuple[str, str]:
    """Count the columns in which CHASM is ahead of all others, as printed and among those with our runs."""
    printed = won = judged = 0
    for (setting, host), quotes in paper.MAIN.items():
        metric = SETTINGS[setting].metrics[0]
        printed += max(quotes, key=lambda arm: quotes[arm][metric].mean) == "chasm"
        study = paper_tables.study_of(setting)
        rows = {arm: finished.get(study, setting, host, arm) for arm in paper.MIXERS}
        means = {arm: row.result.scores[metric].mean for arm, row in rows.items() if row is not None}
        if "chasm" in means and len(means) > 1:
            judged += 1
            won += max(means, key=lambda arm: means[arm]) == "chasm"
    ours = f"{won} of {judged} with finished runs" if judged else text.UNKNOWN
    return f"{printed} of {len(paper.MAIN)} columns", ours


def _drops(falsified: list[Falsification]) -> str:
    drops = []
    for f in falsified:
        drop = f"{f.drop.mean:.1f} %" if math.isfinite(f.drop.mean) else "(no gain to lose)"
        drops.append(f"{SETTINGS[f.setting].title} {drop}")
    return ", ".join(drops) or text.UNKNOWN


def _against(
    finished: FinishedRows, study: str, arm: str, quotes: dict[str, dict[str, paper.Quote]]
) -> tuple[str, str]:
    printed = quotes["chasm"]["psnr"].mean - quotes[arm]["psnr"].mean
    ours, theirs = (finished.get(study, "cc359-x8", "hifi-mamba", name) for name in ("chasm", arm))
    d = paired_difference(ours, theirs, "psnr")
    found = text.UNKNOWN if d is None else f"{text.interval(d, 'psnr')}, {d.verdict}"
    return f"{text.signed(printed, 'psnr', 0)} dB", found
