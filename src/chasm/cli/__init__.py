"""The `chasm` command. Each sub-command lives in its own file and is imported only when it is asked for."""

import sys

from chasm.common.extras import how_to_install
from chasm.common.namesake import namesake_warning


def main() -> None:
    """Run the command line of `chasm`."""
    if warning := namesake_warning():
        print(f"warning: {warning}", file=sys.stderr)
    try:
        from chasm.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.split(".")[0] == "chasm":
            raise
        print(f"error: the command line needs {missing.name}: {how_to_install(missing.name or '')}", file=sys.stderr)
        sys.exit(3)  # as cli/errors.py has it, which needs Typer itself
    app()
