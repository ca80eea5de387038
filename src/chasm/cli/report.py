"""`chasm report`: the results of a study as one HTML file, Markdown and CSV."""

from pathlib import Path

import typer


def report(
    study: str = typer.Argument(..., help="A name of 'chasm study list'."),
    scale: str = typer.Option("tiny", help="tiny, proxy or full: as it was run."),
    protocol: str = typer.Option("default", help="default, matched or tuned: as it was run."),
    root: Path = typer.Option(Path("runs"), "--out", help="Folder of the runs, as given to 'chasm study run'."),
    only: list[str] = typer.Option([], "--only", help="A part of the study: --only host=unet,arm=chasm,gfnet."),
    to: Path | None = typer.Option(None, "--to", "-o", help="Folder of the report. Default: reports, beside the runs."),
) -> None:
    """Write the report of a study, finished or not: tables, differences, cost, curves, pictures, learned operators."""
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
