"""The command tree: every sub-command is a function in a file of its own beside this one."""

import typer

from chasm.cli import data, mixers

app = typer.Typer(
    name="chasm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Spectral mixing for images: compare the mixers, check and preview data, see it learn.",
)
app.command("mixers")(mixers.mixers)
app.add_typer(data.app, name="data")
