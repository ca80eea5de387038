"""What happens to an error: one line on standard error and an exit code, for every command in the same way."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from chasm.common.extras import how_to_install
from chasm.common.text import printable

FAILED = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_CODES = f"""\
Exit codes: 0 means done. 2 means that the command line could not be read. {FAILED} means that the work failed or found
something wrong, and a line on standard error says what. {INTERRUPTED} means interrupted by Ctrl-C, and 143 by SIGTERM
(128 plus the number of the signal). 1 means a bug in chasm, and comes with a traceback."""


def show_error(error: Exception) -> None:
    """Print an error as one line on standard error."""
    typer.echo(f"error: {printable(' '.join(str(error).split()))}", err=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for the errors by which Python, NumPy and torch say that memory does not suffice, on any device."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn expected errors into one line and an exit code; an unexpected one keeps its traceback.

    Expected are wrong values (ValueError), files (OSError), training that diverged (FloatingPointError), too little
    memory, and a package that is not installed. A closed pipe is left to Typer, which ends quietly.

    Raises:
        typer.Exit: with `FAILED`; after Ctrl-C with `INTERRUPTED`, after another signal with 128 and its number.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, FloatingPointError) as e:
        show_error(e)
        raise typer.Exit(FAILED) from None
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        show_error(MemoryError("out of memory: choose a smaller batch or image, or a machine with more"))
        raise typer.Exit(FAILED) from None
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] == "chasm":
            raise
        show_error(ModuleNotFoundError(f"this needs {e.name}: {how_to_install(e.name)}"))
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt as e:
        typer.echo("interrupted: no file is half written; run the same command again", err=True)
        raise typer.Exit(128 + e.args[0] if e.args else INTERRUPTED) from None
