"""What a run can resume from: tensors and checkpoints, verified before they are trusted."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from chasm.common.files import json_safe, read_json, sync_folder, unwritable, write_atomic, write_json

Tensors = dict[str, Tensor]


def save_tensors(path: Path, tensors: Tensors) -> None:
    flat = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}

    def write(partial: Path) -> None:
        mode = partial.stat().st_mode  # by the umask, as of every other file: safetensors would take 0600
        save_file(flat, partial)
        partial.chmod(mode)

    write_atomic(path, write)


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
        shutil.rmtree(partial, ignore_errors=True)  # a killed process may have left half of this step
        try:
            save_tensors(partial / "state.safetensors", tensors)
            digest = _sha256(partial / "state.safetensors")
            content = json_safe({**record, "step": step, "sha256": digest})
            write_json(partial / "record.json", {**content, "record_sha256": _sha256_of(content)})
            shutil.rmtree(target, ignore_errors=True)  # only ever a damaged one, or the same step again
            try:
                os.replace(partial, target)
                sync_folder(self.folder)
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
                record = read_json(folder / "record.json")
                if record.pop("record_sha256") != _sha256_of(record):
                    raise ValueError("checksum of record.json differs")
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


def _sha256_of(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
