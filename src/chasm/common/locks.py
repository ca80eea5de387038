"""One lock: a file that one process holds at a time, released by the system however that process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chasm.common.files import unwritable


class BusyError(ValueError):
    """Another process holds the lock."""


# The locks of this process. Record locks belong to a process: they never conflict with its own, and closing any
# descriptor of the file drops them.
_held: set[Path] = set()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock file, made with its folder if needed, while the block runs.

    It is a record lock, which forked processes do not inherit: data loaders may outlive a killed run.

    Args:
        file: the lock file; it stays when the lock is released.

    Raises:
        BusyError: when another process, or another block of this one, holds it.
        OSError: when the file cannot be made.
    """
    name = file.resolve()
    if name in _held:
        raise _busy(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise unwritable(file, e) from None
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise _busy(file) from None
        _held.add(name)
        yield
    finally:
        _held.discard(name)
        os.close(descriptor)


def is_locked(file: Path) -> bool:
    """Return True if some process holds the lock file. A folder or an unreadable file in its place is not held."""
    if file.resolve() in _held:
        return True
    try:
        with open(file, "rb") as f:
            fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once
        return False
    except (BlockingIOError, PermissionError) as e:
        return e.filename is None  # the lock refuses; an open that fails names its file
    except OSError:
        return False


def _busy(file: Path) -> BusyError:
    return BusyError(f"{file.parent}: another process works there: wait for it, or choose another folder")
