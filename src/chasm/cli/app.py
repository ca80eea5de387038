"""The command tree: every sub-command is a function in a file of its own beside this one."""

from pathlib import Path
from typing import Annotated

import typer

from chasm.cli import bench, data, demo, mixers, reconstruct, report, study, train

app = typer.Typer(
    name="chasm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Spectral mixing for images: see it learn, compare the mixers, train, run the paper's studies, reconstruct.",
)


@app.callback()
def root(
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="FILE.py",
            help="Import this file first: its @register_mixer, @register_dataset, ... names can be used. Repeatable.",
        ),
    ] = None,
) -> None:
    if files:
        from chasm.extensions import load

        try:
            load(files)
        except ValueError as e:
            raise typer.BadParameter(str(e)) from None


app.command("demo")(demo.demo)
app.command("mixers")(mixers.mixers)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("eval")(train.evaluate)
study.app.command("report")(report.report)
app.add_typer(study.app, name="study")
app.command("report")(report.report)
app.command("reconstruct")(reconstruct.reconstruct)
