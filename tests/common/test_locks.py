"""One process holds a lock at a time, and the system releases it with the process."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chasm.common.locks import BusyError, is_locked, locked

HOLD = """import pathlib, sys
from chasm.common.locks import locked
with locked(pathlib.Path(sys.argv[1])):
    print(flush=True)
    input()"""


@contextmanager
def held_elsewhere(file: Path) -> Iterator[None]:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        yield
    finally:
        other.kill()
        other.wait()


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "new" / "lock"
    with held_elsewhere(file):
        assert is_locked(file)
        with pytest.raises(BusyError) as e, locked(file):
            pass
        folder = tmp_path / "new"
        assert str(e.value) == f"{folder}: another process works there: wait for it, or choose another folder"
    assert not is_locked(file)
    with locked(file):
        pass


def test_so_is_another_block_of_the_same_process_and_looking_releases_nothing(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with locked(file):
        assert is_locked(file)
        with pytest.raises(BusyError), locked(tmp_path / "." / "lock"):
            pass
        other = subprocess.run([sys.executable, "-c", HOLD, str(file)], input="", capture_output=True, text=True)
        assert "BusyError" in other.stderr
    assert not is_locked(file)


def wait_for(pipe: int) -> None:
    os.read(pipe, 1)


def test_forked_processes_do_not_keep_it(tmp_path: Path) -> None:
    """Loaders of data may outlive the run that started them."""
    file, (end, start) = tmp_path / "lock", os.pipe()
    child = multiprocessing.get_context("fork").Process(target=wait_for, args=(end,))
    with locked(file):
        child.start()
    try:
        with held_elsewhere(file):
            assert child.is_alive()
    finally:
        os.write(start, b".")
        child.join()


def test_what_is_no_lock_file_is_not_held(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "absent")
    assert not is_locked(tmp_path)
    (tmp_path / "file").touch()
    assert not is_locked(tmp_path / "file" / "lock")
    with pytest.raises(OSError, match=r"lock: could not be written"), locked(tmp_path / "file" / "lock"):
        pass
