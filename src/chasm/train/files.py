"""Files a run must not lose: atomic writes, and checkpoints that are verified before they are trusted."""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


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


def save_tensors(path: Path, tensors: Tensors) -> None:
    flat = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}

    def write(partial: Path) -> None:
        partial.touch()
        mode = partial.stat().st_mode  # by the umask, as of every other file: safetensors would take 0600
        save_file(flat, partial)
        partial.chmod(mode)

    write_atomic(path, write)


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


def holds_work(folder: Path) -> bool:
    """Is there anything of a run that could be lost? A run that failed at its start leaves its config alone."""
    return (folder / "metrics.json").exists() or any((folder / "checkpoints").glob("[0-9]*"))


class Checkpoints:
    """Numbered folders of tensors and a JSON record, the last two kept; a damaged one is reported and passed over."""

    KEPT = 2

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say

    def save(self, step: int, tensors: Tensors, record: dict[str, Any]) -> None:
        target, partial = self.folder / f"{step:08d}", self.folder / f".{step:08d}.partial"
        try:
            save_tensors(partial / "state.safetensors", tensors)
            digest = _sha256(partial / "state.safetensors")
            write_json(partial / "record.json", {**record, "step": step, "sha256": digest})
            shutil.rmtree(target, ignore_errors=True)  # only ever a damaged one, or the same step again
            try:
                os.replace(partial, target)
            except OSError as e:
                raise unwritable(target, e) from None
        finally:
            for left in self.folder.glob(".*.partial"):  # this one's, or that of a killed process
                shutil.rmtree(left, ignore_errors=True)
        kept = [n for n in self._numbers() if n <= step][-self.KEPT :]  # a later one was damaged, else we began there
        for number in set(self._numbers()) - set(kept):
            shutil.rmtree(self.folder / f"{number:08d}", ignore_errors=True)

    def newest(self) -> tuple[Tensors, dict[str, Any]] | None:
        """The newest checkpoint whose content matches its checksum."""
        for number in reversed(self._numbers()):
            folder = self.folder / f"{number:08d}"
            try:
                record = json.loads((folder / "record.json").read_text())
                if _sha256(folder / "state.safetensors") != record["sha256"]:
                    raise ValueError("checksum differs")
                return load_file(folder / "state.safetensors"), record
            except (OSError, ValueError, KeyError) as e:
                self.say(f"checkpoint {folder} is damaged ({e}): trying the one before it")
        return None

    def _numbers(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit())


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
