"""The state of a cell, read from its folder alone, so that processes on all machines agree."""

import os
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path

from chasm.common.files import read_json, write_json, write_text
from chasm.common.locks import is_locked, locked
from chasm.studies.records import Metrics
from chasm.train import NonFiniteError
from chasm.train.checkpoints import holds_work
from chasm.train.config import RunConfig, differences, load_recipe

STATES = ("done", "running", "failed", "interrupted", "missing", "other config")


def working_on(folder: Path) -> AbstractContextManager[object]:
    """Lock a cell inside this context; BusyError if another process works on it."""
    return locked(folder / "lock")


def state(folder: Path, config: RunConfig) -> tuple[str, str | None]:
    """Return the state of a cell.

    Returns:
        One of `STATES`, and what went wrong, if anything.
    """
    try:
        if holds_work(folder) and (folder / "config.yaml").is_file():
            other = differences(load_recipe(folder / "config.yaml"), config)
            if other:
                return "other config", other
        if (folder / "metrics.json").is_file():
            if not (folder / "config.yaml").is_file():
                missing = folder / "config.yaml"
                return "failed", f"{missing}: not there, so the scores may be of any config: remove the folder"
            Metrics.read(folder / "metrics.json")
            return "done", None
    except (OSError, ValueError) as e:  # a file that cannot be read, or has another shape
        return "failed", str(e)
    if is_locked(folder / "lock"):
        return "running", None
    if (folder / "failed.json").is_file():
        return "failed", _recorded_error(folder) or "failed.json cannot be read"
    if folder.exists() and not (folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)):
        return "failed", f"{folder}: not a folder that can be written: remove it, or choose another --out"
    return ("interrupted" if (folder / "lock").exists() else "missing"), None


def failed(folder: Path, error: BaseException | str) -> str:
    """Record a failure in failed.json, and the traceback in traceback.txt; return it in one line."""
    if isinstance(error, BaseException):
        line = f"{type(error).__name__}: {' '.join(str(error).split())}" if str(error) else type(error).__name__
        write_text(folder / "traceback.txt", "".join(traceback.format_exception(error)))
    else:
        line = error
    write_json(folder / "failed.json", {"error": line, "time": time.time(), "pid": os.getpid()})
    return line


def has_diverged(folder: Path) -> bool:
    """Return True if the run failed because its loss, gradient or weights were not finite.

    Such a run would fail again.
    """
    return _recorded_error(folder).startswith(f"{NonFiniteError.__name__}:")


def _recorded_error(folder: Path) -> str:
    try:
        return str(read_json(folder / "failed.json")["error"])
    except (OSError, ValueError, KeyError):
        return ""


def clear_failure(folder: Path) -> None:
    """Remove the record of a failure."""
    for name in ("failed.json", "traceback.txt"):
        (folder / name).unlink(missing_ok=True)
