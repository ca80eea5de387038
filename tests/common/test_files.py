"""Atomic writes: a full disk or a read-only folder is one line, and the earlier file stays."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from chasm.common import files
from chasm.common.files import expanded, read_json, remove_unfinished, write_atomic, write_json, write_text
from chasm.train import load_recipe


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


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"

    def write(partial: Path) -> None:
        partial.write_text("first half, ")
        write_text(path, "the other writer")
        with open(partial, "a") as f:
            f.write("second half")

    write_atomic(path, write)
    assert path.read_text() == "first half, second half"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "a.txt").symlink_to(victim)
    write_text(tmp_path / "a.txt", "new")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "a.txt").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "new"


def test_a_name_that_was_guessed_is_refused_and_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 2 * n)
    (tmp_path / f".chasm-{'0' * 16}.partial").symlink_to(victim)
    with pytest.raises(OSError, match=r"a\.txt: could not be written \(File exists\)"):
        write_text(tmp_path / "a.txt", "new")
    assert victim.read_text() == "mine"


def test_content_is_on_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *a: events.append("rename") or replace(*a))
    write_text(tmp_path / "a.txt", "new")
    assert events == ["file", "rename", "folder"]


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    write_text(path, "new")
    assert path.read_text() == "new"


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = []
    write_atomic(tmp_path / "a.txt", left.append)
    left[0].write_text("half")  # as if that process had been killed
    (tmp_path / "mine.partial").touch()
    remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "mine.partial"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ("[1, 2]", "expected an object in braces, got list"),
        ("null", "expected an object in braces, got NoneType"),
    ],
)
def test_json_of_another_shape_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ValueError, match=rf"metrics\.json: .*{says}.*: remove it"):
        read_json(tmp_path / "metrics.json")


def test_a_pipe_or_a_large_file_is_not_read_as_json(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(OSError, match=r"a\.json: expected a file"):
        read_json(tmp_path / "a.json")
    (tmp_path / "b.json").touch()
    os.truncate(tmp_path / "b.json", 2**40)
    with pytest.raises(ValueError, match=r"b\.json: 1048576 MiB, more than chasm ever writes"):
        read_json(tmp_path / "b.json")


def test_four_writers_and_a_reader_never_meet_half_a_file(tmp_path: Path) -> None:
    """Each writer writes its own letter many times over; a reader sees one letter only, whatever the moment."""
    path, letters = tmp_path / "a.txt", "abcd"
    write_text(path, "a" * 2**16)
    writers = []
    for letter in letters:
        if (child := os.fork()) == 0:
            try:
                for _ in range(25):
                    write_text(path, letter * 2**16)
                os._exit(0)
            except BaseException:
                os._exit(1)
        writers.append(child)
    codes: list[int] = []
    while len(codes) < len(writers):
        text = path.read_text()
        assert len(text) == 2**16
        assert len(set(text)) == 1
        ended, status = os.waitpid(writers[len(codes)], os.WNOHANG)
        codes += [status] * bool(ended)
    assert codes == [0] * len(letters)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_home_of_nobody_is_an_ordinary_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by `make fuzz`: pathlib raises an error of its own, which ended in a traceback."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/scans") == tmp_path / "scans"
    assert expanded("~nobody_of_that_name/scans") == Path("~nobody_of_that_name/scans")
    recipe = load_recipe("demo", ["data.path=~nobody_of_that_name/scans"])
    assert recipe.data.path == str(Path("~nobody_of_that_name/scans").absolute())
