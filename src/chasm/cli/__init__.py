"""The `chasm` command. Each sub-command lives in its own file and is imported only when it is asked for."""

import sys


def main() -> None:
    """Run the command line of `chasm`."""
    try:
        from chasm.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.split(".")[0] == "chasm":
            raise
        needs = f"error: the command line needs {missing.name}: pip install 'chasm-mixer[train,data,report]'"
        print(needs, file=sys.stderr)
        sys.exit(3)  # as cli/errors.py has it, which needs Typer itself
    app()
