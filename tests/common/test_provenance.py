"""What every result carries: where, with what, from which code, by which command."""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from chasm.common import provenance as module
from chasm.common.provenance import command, provenance

NAMED = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *NAMED, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bin/chasm", "train", "a b.yaml"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = provenance(torch.device("cpu"))
    assert found.versions["torch"] == metadata.version("torch")
    assert found.command == "chasm train 'a b.yaml'"
    assert found.device.endswith(" CPU, 1 thread")
    assert list(found.lines()) == ["device", "torch", "CUDA", "triton", "commit", "date", "command"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["bin/chasm", "train", "r.yaml"], "chasm train r.yaml"),
        (["lib/chasm/__main__.py", "--set", "a={b: 1}"], "python -m chasm --set 'a={b: 1}'"),
    ],
)
def test_the_command_can_be_typed_again(argv: list[str], expected: str) -> None:
    assert command(argv) == expected


def test_the_commit_is_that_of_the_repository_that_tracks_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment inside somebody's project has that project's commits around it."""
    copy = tmp_path / "provenance.py"
    shutil.copy(module.__file__, copy)
    monkeypatch.setattr(module, "__file__", str(copy))
    monkeypatch.delenv("CHASM_COMMIT", raising=False)
    assert module._commit() == ("", False)
    monkeypatch.setenv("CHASM_COMMIT", "abc")
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "of another project")
    assert module._commit() == ("abc", False)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "of this one")
    assert module._commit() == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "untracked").touch()
    assert not module._commit()[1]
    copy.write_text("changed")
    assert module._commit()[1]
