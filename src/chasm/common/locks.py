"""One lock: a file that one process holds at a time, released by the system however that process ends."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from chasm.common.files import unwritable

if TYPE_CHECKING:
    from filelock import FileLock

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


class BusyError(ValueError):
    """Another process holds the lock."""


# The locks of this process. Record locks belong to a process: they never conflict with its own, and closing any
# descriptor of the file drops them.
_held: set[Path] = set()


class Lock:
    """A lock file that this process holds: a record lock, which forked processes do not inherit.

    Data loaders may outlive a killed run, so what they inherit must not keep the lock. Where there are no record locks
    (Windows), filelock holds the file instead; processes are not forked there.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._take()

    def _take(self) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                self._foreign = _filelock(self.file)
                return
            if self.file.exists() and not self.file.is_file():
                raise OSError(errno.EINVAL, "not a file")
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as e:
            raise unwritable(self.file, e) from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            raise _busy(self.file) from None
        self._descriptor = descriptor

    def require_place(self) -> None:
        """Make sure that the folder of the lock file is still the one that was locked.

        A folder may be renamed while a process works in it, and another process may begin in a new folder of the same
        name. A folder that was removed is made and locked again.

        Raises:
            OSError: if the lock file is elsewhere now, or another one is in its place.
        """
        if fcntl is None:
            return  # Windows renames no folder with an open file
        held = os.fstat(self._descriptor)
        if held.st_nlink == 0 and not self.file.exists():
            old = self._descriptor
            self._take()
            os.close(old)
            return
        if not self.file.exists() or not os.path.samestat(held, os.stat(self.file)):
            raise OSError(
                f"{self.file.parent}: the folder was renamed or replaced while a process worked in it: "
                "that process stops; give the folder its name again to go on"
            )

    def release(self) -> None:
        """Give the lock back; the file stays."""
        if fcntl is None:
            self._foreign.release()
        else:
            os.close(self._descriptor)


@contextmanager
def locked(file: Path) -> Iterator[Lock]:
    """Hold a lock file, made with its folder if needed, while the block runs. The file stays.

    Raises:
        BusyError: when another process, or another block of this one, holds it.
        OSError: when the file cannot be made.
    """
    name = file.resolve()
    if name in _held:
        raise _busy(file)
    lock = Lock(file)
    _held.add(name)
    try:
        yield lock
    finally:
        _held.discard(name)
        lock.release()


def is_locked(file: Path) -> bool:
    """Return True if some process holds the lock file. A folder or an unreadable file in its place is not held."""
    if file.resolve() in _held:
        return True
    try:
        if not file.is_file():  # a pipe would be opened for ever
            return False
        if fcntl is None:
            _filelock(file).release()
            return False
        with open(file, "rb") as f:
            fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once
        return False
    except BusyError:
        return True
    except (BlockingIOError, PermissionError) as e:
        return e.filename is None  # the lock refuses; an open that fails names its file
    except OSError:
        return False


def _filelock(file: Path) -> "FileLock":
    from filelock import FileLock, Timeout  # torch needs it, so it is there

    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise _busy(file) from None
    return lock


def _busy(file: Path) -> BusyError:
    return BusyError(f"{file.parent}: another process works there: wait for it, or choose another folder")
