"""The command tree: every sub-command is a function in a file of its own beside this one."""

import typer

from chasm.cli import demo

app = typer.Typer(
    name="chasm",
    no_args_is_help=True,
    add_completion=False,
    help="CHASM spectral mixing: demo, comparison tables, data checks.",
)
app.command("demo")(demo.demo)
