"""Files that must not be lost: atomic writes, JSON without NaN, one error line for what cannot be written, a lock."""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """`write` makes the file beside its place; it appears there only when it is complete and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with open(partial, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as e:
        raise unwritable(path, e) from None
    finally:
        with suppress(OSError):  # a read-only place refuses that too
            partial.unlink(missing_ok=True)


def unwritable(path: Path, error: Exception) -> OSError:
    """One line for a full disk, a read-only folder and the like."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return OSError(f"{path}: could not be written ({reason}): free space or choose another folder")


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda p: p.write_text(text))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a file of ours; one line that names it when it is no JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path}: not JSON ({e}): remove it, and the command that made it makes it again") from None


def finite(value: Any) -> Any:
    """Without NaN and infinity, which JSON does not know; keys as strings."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a run's folder: nobody else trains there meanwhile. The system lets go with the process, however that ends.

    By a record lock, which forked processes do not share: those that load data may outlive a killed run.
    """
    path = folder / "training.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as e:
        raise unwritable(path, e) from None
    with open(path, "w") as f:
        try:
            fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            line = f"{folder}: another process trains there: wait for it, or choose another folder"
            raise ValueError(line) from None
        yield
