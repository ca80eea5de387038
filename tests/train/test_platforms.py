"""Windows and macOS, as far as they can be had on another machine: what is missing there is taken away here.

These are mocks. They show that nothing is imported or called that Windows does not have, and that no tensor on an Apple
GPU is float64; they do not show that torch itself works there.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from chasm.common import locks
from chasm.common.locks import BusyError, is_locked, locked

# Modules, constants and functions of POSIX that Windows does not have, as far as chasm could use them. Those that torch
# and Python themselves need here are taken away after they are imported.
WINDOWS = """
import os, signal, sys
import torch, accelerate, asyncio, subprocess
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "sysconf", "getuid", "setsid", "killpg", "mkfifo"):
    delattr(os, name)
for name in ("SIGHUP", "SIGUSR1", "SIGKILL"):
    delattr(signal, name)
"""

USE = """
import pathlib
import chasm.cli.app, chasm.common.locks, chasm.data, chasm.reconstruct, chasm.studies.runner
from chasm.studies import make_plan
from chasm.studies.state import state, working_on
from chasm.train import load_recipe, train
folder = pathlib.Path(sys.argv[1])
config = load_recipe({
    "data": {"name": "embedded", "options": {"size": 16, "cases": 10, "slices": 1}},
    "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
    "mixer": {"name": "chasm"},
    "train": {"steps": 1, "batch": 2},
})
with working_on(folder):
    assert state(folder, config)[0] == "running"
    train(config, folder, quiet=True)
assert state(folder, config)[0] == "done"
assert chasm.common.locks.fcntl is None
"""


def test_training_and_studies_do_without_what_windows_lacks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WINDOWS + USE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_locks_without_record_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    file = tmp_path / "new" / "lock"
    assert not is_locked(file)
    assert not file.exists()
    with locked(file) as lock:
        lock.require_place()
        assert is_locked(file)
        with pytest.raises(BusyError), locked(file):
            pass
        monkeypatch.setattr(locks, "_held", set())  # as another process sees it
        assert is_locked(file)
        with pytest.raises(BusyError), locked(file):
            pass
    assert not is_locked(file)
    with locked(file):
        pass
