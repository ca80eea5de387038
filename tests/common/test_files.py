"""Atomic writes: a full disk or a read-only folder is one line, and the earlier file stays."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from chasm.common import files
from chasm.common.files import read_json, write_json, write_text


def fails_with(number: int) -> Any:
    def write(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize(("number", "says"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only file system")])
@pytest.mark.parametrize("at", ["write_text", "replace"])
def test_a_failed_write_is_one_line_and_keeps_the_old_file(
    number: int, says: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    place = (Path, "write_text") if at == "write_text" else (files.os, "replace")
    monkeypatch.setattr(*place, fails_with(number))
    if number == errno.EROFS:
        monkeypatch.setattr(Path, "unlink", fails_with(number))
    with pytest.raises(OSError, match=says) as e:
        write_text(path, "new")
    assert str(e.value) == f"{path}: could not be written ({os.strerror(number)}): free space or choose another folder"
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"old": 1}
    if number != errno.EROFS:
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("")
    with pytest.raises(ValueError, match=r"metrics\.json: not JSON \(Expecting value.*\): remove it"):
        read_json(tmp_path / "metrics.json")
