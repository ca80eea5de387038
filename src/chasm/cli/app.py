"""The command tree. Every sub-command is a function in its own file beside this one."""

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from chasm.cli import bench, browser, data, demo, export, harmonise, mixers, models, reconstruct, report, study, train
from chasm.cli.errors import EXIT_CODES, one_line_errors


class Commands(TyperGroup):
    """The commands, with what all of them share: `--with` anywhere on the line, and one way to fail."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move every --with to the front, where Typer expects the options of the root command."""
        files, rest, words = list[str](), list[str](), iter(args)
        for word in words:
            if word == "--with" or word.startswith("--with="):
                files += [word, *islice(words, word == "--with")]
            else:
                rest.append(word)
        if files[-1:] == ["--with"]:  # its file is missing: drop the rest, or Typer would take a command for the file
            rest = []
        return super().parse_args(ctx, [*files, *rest])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an expected error becomes one line and an exit code."""
        with one_line_errors():
            return super().invoke(ctx)


app = typer.Typer(
    name="chasm",
    cls=Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs of a help text flow with the terminal
    help="Spectral mixing for images. Compare mixers, train networks, run the studies of the paper, and reconstruct "
    "scans. Begin with 'chasm demo', which needs no data.",
    epilog=EXIT_CODES,
)


@app.callback()
def root(
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="FILE.py",
            help="Import this file first, so that names it registers (@register_mixer, ..) are known. Repeatable.",
        ),
    ] = None,
) -> None:
    """Import the files of --with before any command runs."""
    if files:
        from chasm.common.extensions import load_extensions

        load_extensions(files)


app.command("demo")(demo.demo)
app.add_typer(mixers.app, name="mixers")
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.add_typer(models.app, name="models")
app.command("train")(train.train)
app.command("eval")(train.evaluate)
study.app.command("report")(report.report)
app.add_typer(study.app, name="study")
app.command("report")(report.report)
app.command("harmonise")(harmonise.harmonise)
app.command("export")(export.export)
app.command("reconstruct")(reconstruct.reconstruct)
app.command("app")(browser.app)
