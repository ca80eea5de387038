"""The command tree: every sub-command is a function in a file of its own beside this one."""

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from chasm.cli import bench, data, demo, mixers, reconstruct, report, study, train
from chasm.cli.errors import EXIT_CODES, one_line_errors


class Commands(TyperGroup):
    """The commands, with what all of them share: `--with` anywhere on the line, and one way to fail."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first, rest, words = list[str](), list[str](), iter(args)
        for word in words:
            if word == "--with" or word.startswith("--with="):
                first += [word, *islice(words, word == "--with")]
            else:
                rest.append(word)
        lone = first[-1:] == ["--with"]  # its file is missing: it must not take the command for one
        return super().parse_args(ctx, first if lone else [*first, *rest])

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


app = typer.Typer(
    name="chasm",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs of a help text flow with the terminal
    help="Spectral mixing for images: see it learn ('chasm demo' needs no data), compare the mixers, train, run the "
    "paper's studies, reconstruct.",
    epilog=EXIT_CODES,
)


@app.callback()
def root(
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="FILE.py",
            help="Import this file first: what it registers (@register_mixer, ..) can be named. Repeatable.",
        ),
    ] = None,
) -> None:
    if files:
        from chasm.common.extensions import load

        load(files)


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
