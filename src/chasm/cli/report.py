"""`chasm report`: the results of a study as one HTML file, Markdown and CSV; or the paper's tables with our runs."""

from pathlib import Path

import typer

from chasm.common.extras import require

PAPER = "paper"


def report(
    study: str = typer.Argument(..., help="A name of 'chasm study list', or paper for all tables of the paper."),
    folders: list[Path] = typer.Argument(
        None, help="Only with paper: folders of runs, as given to 'chasm study run --out'. Default: that of --out."
    ),
    scale: str = typer.Option("tiny", help="tiny, proxy or full, as in 'chasm study run'."),
    protocol: str = typer.Option("default", help="default, matched or tuned, as in 'chasm study run'."),
    root: Path = typer.Option(Path("runs"), "--out", help="Folder of the runs, as in 'chasm study run'."),
    only: list[str] = typer.Option([], "--only", help="Take a part of the study: --only host=unet,arm=chasm,gfnet."),
    to: Path | None = typer.Option(None, "--to", "-o", help="Folder of the report. Default: reports, beside the runs."),
) -> None:
    """Write the report of a study, finished or not: tables, differences, cost, curves, pictures, learned operators.

    'chasm report paper' puts the finished runs of all studies into the tables and figures of the paper. It writes each
    table also as LaTeX and CSV, and each figure as PDF and PNG.
    """
    require("train", "data", "report")
    if study == PAPER:
        _report_paper(folders or [root], scale, protocol, only, to)
        return
    if folders:
        raise ValueError(f"chasm report {study} takes no folder as argument: give the folder of the runs with --out")
    from chasm.common.files import write_json
    from chasm.studies import collect, load_plan
    from chasm.studies.plan import part_of
    from chasm.studies.report import write_report

    results = collect(part_of(load_plan(root, study, scale, protocol), only), root)
    folder = to or root / scale / "reports" / f"{study}.{protocol}"
    page = write_report(results, folder, root=root)
    write_json(page.with_suffix(".json"), results.to_json())
    counts = ", ".join(f"{n} {status}" for status, n in results.counts.items())
    typer.echo(f"{page.resolve()}\n{study} ({scale}, {protocol}): {counts}")


def _report_paper(folders: list[Path], scale: str, protocol: str, only: list[str], to: Path | None) -> None:
    from chasm.common.text import counted
    from chasm.studies.report import write_paper_page

    if only:
        raise ValueError("chasm report paper shows every table: --only is for the report of one study")
    page, runs = write_paper_page(
        folders, to or folders[0] / scale / "reports" / f"{PAPER}.{protocol}", scale, protocol
    )
    typer.echo(f"{page.resolve()}\npaper ({scale}, {protocol}): {counted(runs, 'finished run')}")
