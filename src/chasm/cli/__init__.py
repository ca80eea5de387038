"""The `chasm` command. Each sub-command lives in its own file and is imported only when it is asked for."""

import sys


def main() -> None:
    try:
        from chasm.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.split(".")[0] == "chasm":
            raise
        sys.exit(f"chasm: the command line needs {missing.name}: pip install 'chasm-mixer[train,data,report]'")
    app()
