"""A disk that fails on demand, and one that loses power: what a save asks of the file system, recorded and replayed.

Recorded are the operations that change names or make content last: creating a file or folder, fsync of either, rename,
unlink and rmdir. Content that was written but not synced may be lost, and so may names in a folder that was not synced;
either may also have reached the disk already. `crashes` returns every such state after a given operation.
"""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chasm.train import checkpoints

OPERATIONS = ("open", "fsync", "replace", "mkdir", "unlink", "rmdir")
Operation = tuple[str, Path, Any]  # what, where, and the other name or the content


def _place(path: Any, dir_fd: int | None) -> Path:
    """The absolute path of what an operation names."""
    if isinstance(path, int):
        return Path(os.readlink(f"/proc/self/fd/{path}"))
    folder = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
    return folder / os.fspath(path)


@contextmanager
def watched(root: Path, before: Callable[[str], None], after: Callable[[Operation], None]) -> Iterator[None]:
    """Call `before` and `after` each operation below a folder, safetensors' own writing among them."""

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            place = _place(path, dir_fd)
            is_read = name == "open" and not (args and args[0] & (os.O_CREAT | os.O_WRONLY))
            if not place.is_relative_to(root) or is_read:
                return original(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))
            before(name)
            result = original(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))
            what = Path(args[0]) if name == "replace" else None
            content = place.read_bytes() if name == "fsync" and place.is_file() else what
            after((name, place, content))
            return result

        return operation

    def save_file(tensors: Any, path: Path, metadata: dict[str, str] | None = None) -> None:
        try:
            before("write")
        except OSError:
            path.write_bytes(b"half of it")
            raise
        original_save(tensors, path, metadata)

    def write_text(path: Path, text: str, **how: str) -> None:
        with open(path, "w", **how) as f:  # type: ignore[call-overload]
            f.write(text[: len(text) // 2])
            before("write")
            f.write(text[len(text) // 2 :])

    original_save = checkpoints.save_file
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        patch.setattr(checkpoints, "save_file", save_file)
        patch.setattr(Path, "write_text", write_text)
        yield


class FailingDisk:
    """A disk on which the operation with one number fails."""

    def __init__(self, number: int, error: int = errno.EIO) -> None:
        self.number, self.error, self.done = number, error, 0

    def before(self, name: str) -> None:
        self.done += 1
        if self.done == self.number:
            raise OSError(self.error, os.strerror(self.error))

    @property
    def has_failed(self) -> bool:
        return self.done >= self.number


@dataclass
class _File:
    synced: bytes | None = None


@dataclass
class _Folder:
    names: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)


def _replayed(operations: list[Operation], root: Path) -> _Folder:
    """The folder `root`, which is on disk, after the operations."""
    top = _Folder()

    def folder(path: Path) -> _Folder:
        found: Any = top
        for part in path.relative_to(root).parts:
            found = found.names[part]
        return found  # type: ignore[no-any-return]

    for name, path, more in operations:
        if name == "open":
            folder(path.parent).names.setdefault(path.name, _File())
        elif name == "mkdir":
            folder(path.parent).names[path.name] = _Folder()
        elif name == "fsync" and more is not None:
            folder(path.parent).names[path.name].synced = more
        elif name == "fsync":
            folder(path).synced = dict(folder(path).names)
        elif name == "replace":
            folder(more.parent).names[more.name] = folder(path.parent).names.pop(path.name)
        else:
            del folder(path.parent).names[path.name]
    return top


def crashes(operations: list[Operation], root: Path) -> Iterator[dict[str, bytes]]:
    """Yield what the disk may hold if the power fails after the operations, as files by their relative names.

    Every folder has its names as of now or as of its last fsync, each independently; content that was not synced is
    empty or garbage.
    """
    top = _replayed(operations, root)
    folders: list[_Folder] = []

    def collect(folder: _Folder) -> None:
        if not any(folder is known for known in folders):
            folders.append(folder)
            for entry in (*folder.names.values(), *folder.synced.values()):
                if isinstance(entry, _Folder):
                    collect(entry)

    collect(top)
    seen = set()
    for choice in itertools.product((False, True), repeat=len(folders)):
        is_late = {id(folder): late for folder, late in zip(folders, choice, strict=True)}
        for lost in (b"", b"\0garbage"):
            state: dict[str, bytes] = {}

            def walk(folder: _Folder, where: str, state: dict[str, bytes] = state, lost: bytes = lost) -> None:
                for name, entry in (folder.names if is_late[id(folder)] else folder.synced).items():  # noqa: B023
                    if isinstance(entry, _Folder):
                        walk(entry, f"{where}{name}/")
                    else:
                        state[where + name] = lost if entry.synced is None else entry.synced

            walk(top, "")
            key = tuple(sorted(state.items()))
            if key not in seen:
                seen.add(key)
                yield state
