"""How far a cell is: read from its folder alone, so that any process on any machine sees the same."""

import fcntl
import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chasm.common.files import read_json, write_json, write_text
from chasm.train.checkpoints import holds_work
from chasm.train.config import RunConfig, differences, load_recipe

STATES = ("done", "running", "failed", "interrupted", "missing", "other config")


class BusyError(RuntimeError):
    """Another process is working on the cell."""


@contextmanager
def working_on(folder: Path) -> Iterator[None]:
    """Hold the cell: a lock the system drops with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{folder.name} is being run by another process") from None
        yield


def state(folder: Path, config: RunConfig) -> tuple[str, str | None]:
    """(one of STATES, what went wrong)."""
    if holds_work(folder) and (folder / "config.yaml").is_file():
        other = differences(load_recipe(folder / "config.yaml"), config)
        if other:
            return "other config", other
    if (folder / "metrics.json").is_file():
        try:
            read_json(folder / "metrics.json")
            return "done", None
        except ValueError as e:
            return "failed", str(e)
    if _held(folder / "lock"):
        return "running", None
    if (folder / "failed.json").is_file():
        try:
            return "failed", str(json.loads((folder / "failed.json").read_text())["error"])
        except (OSError, ValueError, KeyError):
            return "failed", "failed.json cannot be read"
    if folder.exists() and not (folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)):
        return "failed", f"{folder}: not a folder that can be written: remove it, or choose another --out"
    return ("interrupted" if (folder / "lock").exists() else "missing"), None


def _held(lock: Path) -> bool:
    try:
        with open(lock) as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, and released at once
        return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # a plain file in its place, or one that may not be read: nobody works there
        return False


def failed(folder: Path, error: BaseException | str) -> str:
    """Record a failure: one line, and the traceback in a file of its own. Returns the line."""
    if isinstance(error, BaseException):
        line = f"{type(error).__name__}: {' '.join(str(error).split())}" if str(error) else type(error).__name__
        write_text(folder / "traceback.txt", "".join(traceback.format_exception(error)))
    else:
        line = error
    write_json(folder / "failed.json", {"error": line, "time": time.time(), "pid": os.getpid()})
    return line


def clear_failure(folder: Path) -> None:
    for name in ("failed.json", "traceback.txt"):
        (folder / name).unlink(missing_ok=True)
