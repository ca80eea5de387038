"""Files that must not be lost: atomic writes, JSON without NaN, one error line for what cannot be written."""

import errno
import hashlib
import json
import math
import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MAKE_AGAIN = "remove it and repeat the command that made it"  # advice about a damaged file that chasm wrote
MAX_JSON_BYTES = 64 * 2**20  # parsed, JSON takes about ten times that
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows does not have it
_UNFINISHED = ".chasm-{}.partial"  # without the name of the file, which may be as long as a name can be


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that it appears at its place complete, on disk, or not at all.

    `write` is called with the path of an empty file with a random name in the same folder, which is made if needed. The
    file is synced and then renamed. The file or link that was at `path` stays until then; a link is replaced, not
    followed.

    Raises:
        OSError: if the disk is full, the folder is read-only and the like; the message names `path` and the reason.
    """
    partial = path.with_name(_UNFINISHED.format(secrets.token_hex(8)))
    try:
        make_folder(path.parent)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666))
        write(partial)
        with open(partial, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as e:
        raise unwritable(path, e) from None
    finally:
        with suppress(OSError):  # a read-only place refuses that too
            partial.unlink(missing_ok=True)


def require_replaceable(path: Path, ours: Callable[[Path], bool], force: bool | None = None) -> None:
    """Raise a ValueError if writing `path` would replace something that chasm did not write.

    Args:
        path: the file to write.
        ours: says of the file that is there whether chasm wrote it; not called if `force`.
        force: whether any file may be replaced; None for a command without the option --force. Folders, pipes and
            devices never are.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file, and it is never replaced: give another name")
    if path.exists() and not force and not ours(path):
        advice = "move it away" if force is None else "--force"
        raise ValueError(f"{path}: chasm did not write this file, and it would be lost: give another name, or {advice}")


def holds(path: Path, mark: bytes) -> bool:
    """Return True if a file holds some bytes, anywhere; it is not read into memory."""
    with open(path, "rb") as f:
        if os.fstat(f.fileno()).st_size < len(mark):
            return False
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(mark) >= 0


def is_folder_name(name: object) -> bool:
    """Return True for a name that a folder can have: it leads nowhere else.

    >>> is_folder_name("brain-x8"), is_folder_name("../brain"), is_folder_name("..")
    (True, False, False)
    """
    return (
        isinstance(name, str) and name not in ("", ".", "..") and all(c.isprintable() and c not in "/\\" for c in name)
    )


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that it survives a power failure."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power failure, on the file systems that can.

    Raises:
        OSError: if the disk fails or is full.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as e:  # some, as on Windows, cannot sync a folder, and a folder may be writable but not readable
        if e.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left of atomic writes. Call it only while holding the folder's lock."""
    for left in folder.glob(_UNFINISHED.format("*")):
        left.unlink(missing_ok=True)


def unwritable(path: Path, error: Exception) -> OSError:
    """Return the one-line error for a file that cannot be written: a full disk, a read-only folder and the like."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return OSError(f"{path}: could not be written ({reason}): free space or choose another folder")


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    write_atomic(path, lambda p: p.write_text(text, encoding="utf-8", newline="\n"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes atomically."""
    write_atomic(path, lambda p: p.write_bytes(content))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON atomically; NaN and infinity become null."""
    write_text(path, json.dumps(json_safe(value), indent=2, allow_nan=False) + "\n")


def expanded(path: str | Path) -> Path:
    """Return the path with a leading ~ replaced by the home folder. ~ and the name of no user stay, as in a shell."""
    return Path(os.path.expanduser(path))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that chasm wrote, which always holds an object.

    Raises:
        ValueError: if it holds anything else; the message names the file.
        OSError: when it cannot be opened, or is no file.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: expected a file: {MAKE_AGAIN}")
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"{path}: {size / 2**20:.0f} MiB, more than chasm ever writes: {MAKE_AGAIN}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: not JSON ({e}): {MAKE_AGAIN}") from None
    except RecursionError:
        raise ValueError(f"{path}: not JSON that chasm wrote (nested too deeply): {MAKE_AGAIN}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected an object in braces, got {type(value).__name__}: {MAKE_AGAIN}")
    return value


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def json_safe(value: Any) -> Any:
    """Return the value with None for NaN and infinity, lists for tuples, and strings for keys, as JSON wants it.

    >>> json_safe({1: (0.5, float("nan"))})
    {'1': [0.5, None]}
    """
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
