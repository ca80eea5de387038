"""What happens to an error: one line on standard error and an exit code, for every command in the same way."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from chasm.common.extras import how_to_install

FAILED = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_CODES = f"""\
Exit codes: 0 done; 2 the command line could not be read; {FAILED} it was read, but the work could not be done or
found something wrong, and a line on standard error says what; {INTERRUPTED} interrupted by Ctrl-C, 143 by SIGTERM
(128 and the number of the signal); 1 a bug in chasm, with its traceback."""


def show_error(error: Exception) -> None:
    """Print an error as one line on standard error."""
    typer.echo(f"error: {' '.join(str(error).split())}", err=True)


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
        typer.echo("interrupted: no file is half written; the same command goes on with what is left", err=True)
        raise typer.Exit(128 + e.args[0] if e.args else INTERRUPTED) from None
