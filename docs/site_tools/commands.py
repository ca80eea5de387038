"""The reference of the command line: what `--help` says, a page for every command below `chasm`."""

import re
from typing import Any

import typer

from chasm.cli.app import app
from chasm.cli.errors import EXIT_CODES
from chasm.common.tables import markdown_table

QUOTED_COMMAND = re.compile(r"'((?:chasm|accelerate) [^'\n]+)'")


def command_pages() -> dict[str, str]:
    """Return a page for every command below `chasm`, by its name, with the commands below it."""
    root: Any = typer.main.get_command(app)
    return {
        name: "\n\n".join(sections(node, f"chasm {name}", "#")) + "\n"
        for name, node in root.commands.items()
        if not node.hidden
    }


def overview() -> str:
    """Return the content of the page of all commands: their list, the options of `chasm` itself, exit codes."""
    root: Any = typer.main.get_command(app)
    names = list(command_pages())
    rows = [[f"[`chasm {name}`](commands/{name}.md)", first_sentence(root.commands[name].help)] for name in names]
    return "\n\n".join(
        [
            markdown_table(["command", "what it does"], rows),
            "## Options of every command",
            table_of(root),
            f"## Exit codes\n\n{escaped(EXIT_CODES.removeprefix('Exit codes: '))}",
            "```{toctree}\n:hidden:\n\n" + "\n".join(f"commands/{name}" for name in names) + "\n```\n",
        ]
    )


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text, for Markdown."""
    return escaped(re.split(r"(?<=\.)\s", text.strip(), maxsplit=1)[0]).replace("\n", " ")


def sections(node: Any, path: str, level: str = "##") -> list[str]:
    """Return the sections of a command and of the commands below it.

    Args:
        node: the command, as Typer has it.
        path: what a user types to call it.
        level: the marks of its heading.
    """
    text = "\n\n".join(filter(None, (f"{level} {path}", escaped(node.help or ""), table_of(node))))
    below = [
        section
        for name, child in getattr(node, "commands", {}).items()
        for section in sections(child, f"{path} {name}")
    ]
    return [text, *below]


def table_of(node: Any) -> str:
    """Return the arguments and options of a command as a table, or nothing if it has none."""
    rows = [[f"`{name_of(parameter)}`", described(parameter)] for parameter in node.params]
    return markdown_table(["option", "what it does"], rows) if rows else ""


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
    """Return plain text that Markdown shows as it is, with options and quoted commands as code."""
    parts = QUOTED_COMMAND.split(text)  # every second part is a command
    return "".join(f"`{part}`" if k % 2 else escaped_words(part) for k, part in enumerate(parts))


def escaped_words(text: str) -> str:
    """Return text without quoted commands, for Markdown, with options as code."""
    text = re.sub(r"([*<|\[\]`@])", r"\\\1", text)
    return re.sub(r"(?<![\w-])(--?[a-zA-Z][a-z_-]*)", r"`\1`", text)
