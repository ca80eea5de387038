"""The `chasm` command. Each sub-command lives in its own file and is imported only when it is asked for."""

import io
import sys

from chasm.common.extras import namesake_warning


def main() -> None:
    """Run the command line of `chasm`."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may have characters that it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    if warning := namesake_warning():
        print(f"warning: {warning}", file=sys.stderr)
    try:
        from chasm.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.split(".")[0] == "chasm":
            raise
        # [all] and not only what this command lacks: the next command would lack something else.
        print(f"error: the command line needs {missing.name}: pip install 'chasm-mixer[all]'", file=sys.stderr)
        sys.exit(3)  # as cli/errors.py has it, which needs Typer itself
    app()
