"""The reference of the command line: what `--help` says about every command, as one page."""

import re
from typing import Any

import typer

from chasm.cli.app import app
from chasm.cli.errors import EXIT_CODES
from chasm.common.tables import markdown_table


def commands_page() -> str:
    """Return a section for every command, with its arguments and options."""
    root = typer.main.get_command(app)
    return (
        "\n\n".join([*sections(root, "chasm"), f"## Exit codes\n\n{escaped(EXIT_CODES.removeprefix('Exit codes: '))}"])
        + "\n"
    )


def sections(node: Any, path: str) -> list[str]:
    """Return the sections of a command and of the commands below it.

    Args:
        node: the command, as Typer has it.
        path: what a user types to call it.
    """
    rows = [[f"`{name_of(parameter)}`", described(parameter)] for parameter in node.params]
    table = markdown_table(["option", "what it does"], rows) if rows else ""
    text = "\n\n".join(filter(None, (f"## `{path}`", escaped(node.help or ""), table)))
    below = [
        section
        for name, child in getattr(node, "commands", {}).items()
        for section in sections(child, f"{path} {name}")
    ]
    return [text, *below]


def name_of(parameter: Any) -> str:
    """Return how an argument or option is written: "INPUT", or "--out, -o"."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.opts[0].upper())
    return ", ".join((*parameter.opts, *parameter.secondary_opts))


def described(parameter: Any) -> str:
    """Return the help of an option in one line, with its default if it has one."""
    default = parameter.default
    says_nothing = default is None or default in ([], "") or getattr(parameter, "is_flag", False)
    shown = "" if says_nothing else f" Default: {default}."
    return escaped(f"{parameter.help or ''}{shown}").replace("\n", " ")


def escaped(text: str) -> str:
    """Return plain text that Markdown shows as it is, with options as code."""
    text = re.sub(r"([*<|\[\]`@])", r"\\\1", text)
    return re.sub(r"(?<![\w-])(--?[a-zA-Z][a-z_-]*)", r"`\1`", text)
