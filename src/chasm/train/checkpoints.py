"""The checkpoints that a run resumes from. Their checksums are verified before they are used."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from chasm.common.files import json_safe, read_json, sha256, sync_folder, unwritable, write_atomic, write_json
from chasm.train.record import Record

Tensors = dict[str, Tensor]
RUN_FILES = ("config.yaml", "weights.safetensors", "log.csv", "log.jsonl", "nonfinite.jsonl", "examples.npz")


def save_tensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, atomically.

    Args:
        path: file to write; its folder is created.
        tensors: tensors by name, from any device.
        metadata: metadata of the header. With at most one entry, equal tensors give equal files.

    Raises:
        OSError: if the file cannot be written.
    """
    flat = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}

    def write(partial: Path) -> None:
        mode = partial.stat().st_mode  # the umask decides, as for every other file; safetensors would set 0600
        save_file(flat, partial, metadata)
        partial.chmod(mode)

    write_atomic(path, write)


def holds_work(folder: Path) -> bool:
    """Return True if the folder holds results or checkpoints of a run, and not just the config of one that failed."""
    return (folder / "metrics.json").exists() or any((folder / "checkpoints").glob("[0-9]*"))


def refuse_foreign_files(folder: Path) -> None:
    """Raise a ValueError if the folder has files with the names of a run's, and no run was begun in it."""
    if holds_work(folder) or any((folder / begun).exists() for begun in ("training.lock", "environment.json")):
        return
    for name in RUN_FILES:
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name}: chasm did not write this file, and it would be lost: choose another folder"
            )


class Checkpoints:
    """Numbered folders with tensors and a JSON record, of which the last two are kept.

    Args:
        folder: folder of the numbered folders.
        say: called with a line for people, for example about a damaged checkpoint.
    """

    MAX_CHECKPOINTS = 2

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say

    def save(self, tensors: Tensors, record: Record) -> None:
        """Write a checkpoint, then remove those that are too old.

        A process that is killed at any moment leaves the previous checkpoint whole.

        Args:
            tensors: tensors by name.
            record: the other values. Its step is the number of the checkpoint.

        Raises:
            OSError: if the checkpoint cannot be written.
        """
        step = record.step
        target, partial = self.place(step), self.folder / f".{step:08d}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # a killed process may have left an unfinished one
        try:
            save_tensors(partial / "state.safetensors", tensors)
            digest = sha256(partial / "state.safetensors")
            content = json_safe({**asdict(record), "sha256": digest})
            write_json(partial / "record.json", {**content, "record_sha256": sha256_of(content)})
            shutil.rmtree(target, ignore_errors=True)  # a damaged checkpoint, or the same step from before
            try:
                os.replace(partial, target)
                sync_folder(self.folder)
            except OSError as e:
                raise unwritable(target, e) from None
        finally:
            for unfinished in self.folder.glob(".*.partial"):  # files of this call, or of a killed process
                shutil.rmtree(unfinished, ignore_errors=True)
        # A checkpoint with a higher number is damaged: otherwise the run would have resumed from it.
        newest = [n for n in self._numbers() if n <= step][-self.MAX_CHECKPOINTS :]
        for number in set(self._numbers()) - set(newest):
            shutil.rmtree(self.place(number), ignore_errors=True)

    def newest(self) -> tuple[Tensors, Record] | None:
        """Return the tensors and the record of the newest checkpoint that is whole, or None if there is none.

        Damaged checkpoints are reported to `say` and passed over.
        """
        for number in reversed(self._numbers()):
            folder = self.place(number)
            try:
                content = read_json(folder / "record.json")
                if content.pop("record_sha256") != sha256_of(content):
                    raise ValueError("checksum of record.json differs")
                record = Record.of(content)
                if record.step != number:
                    raise ValueError(f"it was saved at step {record.step}")
                if sha256(folder / "state.safetensors") != content["sha256"]:
                    raise ValueError("checksum differs")
                return load_file(folder / "state.safetensors"), record
            except (OSError, ValueError, KeyError, SafetensorError) as e:
                self.say(f"checkpoint {folder} is damaged ({e}): trying the one before it")
        return None

    def place(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"{step:08d}"

    def _numbers(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit())


def sha256_of(record: dict[str, Any]) -> str:
    """Return the checksum of a record: the SHA-256 of its JSON with sorted keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
