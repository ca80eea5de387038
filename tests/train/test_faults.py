"""Whatever fails during a save, and whenever the power does: the previous checkpoint loads.

The numbers of cases are stated in docs/reliability.md.
"""

import shutil
from pathlib import Path

import pytest
import torch
from disk import FailingDisk, Operation, crashes, watched
from small import record

from chasm.common.files import write_text
from chasm.train.checkpoints import Checkpoints


def save(folder: Path, step: int) -> None:
    Checkpoints(folder, pytest.fail).save({"x": torch.full((3,), step)}, record(step))


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, which must be whole; 0 if there is none."""
    found = Checkpoints(folder, lambda line: None).newest()
    if found is None:
        return 0
    tensors, read = found
    assert torch.equal(tensors["x"], torch.full((3,), read.step))
    assert read == record(read.step)
    return read.step


def test_every_operation_of_a_save_fails_once(tmp_path: Path) -> None:
    failures = 0
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        save(folder, 1)
        save(folder, 2)
        disk = FailingDisk(number)
        with watched(folder, disk.before, lambda operation: None):
            try:
                save(folder, 3)
                is_saved = True
            except OSError as e:
                is_saved = False
                line = str(e)
        if not disk.has_failed:
            break
        failures += 1
        if is_saved:  # only to remove what is too old failed
            assert newest(folder) == 3
        else:
            assert "\n" not in line
            assert newest(folder) in (2, 3)
        save(folder, 4)  # and the next one succeeds
        assert newest(folder) == 4
        assert not list(folder.glob(".*"))
    assert failures == 19  # as docs/reliability.md says


def test_every_operation_of_an_atomic_write_fails_once(tmp_path: Path) -> None:
    path, failures = tmp_path / "a.txt", 0
    for number in range(1, 100):
        write_text(path, "before")
        disk = FailingDisk(number)
        with watched(tmp_path, disk.before, lambda operation: None):
            try:
                write_text(path, "after")
                is_written = True
            except OSError as e:
                is_written = False
                line = str(e)
        if not disk.has_failed:
            break
        failures += 1
        if not is_written:
            assert line.startswith(f"{path}: could not be written")
        assert path.read_text() == "after" if is_written else path.read_text() in ("before", "after")
    assert failures == 6


def test_the_power_fails_after_every_operation(tmp_path: Path) -> None:
    root, replica = tmp_path / "disk", tmp_path / "after the crash"
    root.mkdir()
    operations: list[Operation] = []
    saved_at = []  # after so many operations another checkpoint is on disk
    with watched(root, lambda name: None, operations.append):
        for step in (1, 2, 3):
            save(root / "run" / "checkpoints", step)
            saved_at.append(len(operations))
    states = 0
    for count in range(len(operations) + 1):
        promised = sum(count >= at for at in saved_at)
        for state in crashes(operations[:count], root):
            for name, content in state.items():
                (replica / name).parent.mkdir(parents=True, exist_ok=True)
                (replica / name).write_bytes(content)
            assert newest(replica / "run" / "checkpoints") >= promised, f"after {operations[count - 1]}: {list(state)}"
            shutil.rmtree(replica, ignore_errors=True)
            states += 1
    assert (len(operations), states) == (43, 74)
