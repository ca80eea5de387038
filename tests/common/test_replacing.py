"""What commands refuse to replace: files that chasm did not write, whatever option names them."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.common.files import holds
from chasm.common.locks import is_locked, locked
from chasm.data.bart import write_cfl
from chasm.studies import executors
from chasm.studies.report import page
from chasm.train import load_recipe, train

LETTER = "# A letter\n\nDear reader\n"
RECIPE = {
    "data": {"name": "embedded", "options": {"size": 16, "cases": 10, "slices": 1}},
    "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
    "train": {"steps": 1, "batch": 2},
}


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 3, result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    return result.output


@pytest.mark.parametrize("suffix", [".md", ".csv"])
def test_bench_keeps_pages_of_others(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"README{suffix}").write_text(LETTER)
    assert "would be lost" in refused("bench", "bases", "--device", "cpu", "-o", tmp_path / "README")
    assert (tmp_path / f"README{suffix}").read_text() == LETTER


def test_bench_keeps_pictures_of_others(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text(LETTER)
    assert "would be lost" in refused("bench", "scaling", "--plot", tmp_path / "a.png", "--device", "cpu")


def test_export_keeps_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text(LETTER)
    assert "or --force" in refused("export", tmp_path, "-o", tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["report.html", "report.md", "report.csv", "report.json"])
def test_a_report_keeps_files_of_others(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LETTER)
    empty = page.ReportPage("title", "", [], [], [], "command")
    with pytest.raises(ValueError, match="would be lost: give another name, or move it away"):
        page.write_page(empty, tmp_path / "report.html")
    (tmp_path / name).unlink()
    for _ in range(2):  # its own it replaces
        page.write_page(empty, tmp_path / "report.html")


def test_convert_keeps_the_header_of_others_and_both_files_of_its_input(tmp_path: Path) -> None:
    write_cfl(np.ones((8, 6)), tmp_path / "a.cfl")
    (tmp_path / "b.hdr").write_text(LETTER)
    assert "b.hdr: is there and would be lost" in refused("data", "convert", tmp_path / "a.cfl", tmp_path / "b.cfl")
    for name in ("a.cfl", "a.hdr"):
        words = ("data", "convert", tmp_path / name, tmp_path / "a.cfl", "--force")
        assert "is the input, which would be lost" in refused(*words)


def test_convert_keeps_an_input_that_has_the_name_of_a_volume(tmp_path: Path) -> None:
    write_cfl(np.ones((8, 6, 1, 1, 1, 2)), tmp_path / "a-echo1.cfl")
    words = ("data", "convert", tmp_path / "a-echo1.cfl", tmp_path / "a.cfl", "--force")
    assert "a-echo1.cfl: is the input" in refused(*words)


@pytest.mark.parametrize("name", ["config.yaml", "log.csv", "weights.safetensors"])
def test_training_keeps_files_of_others(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LETTER)
    with pytest.raises(ValueError, match=f"{name}: chasm did not write this file, and it would be lost"):
        train(load_recipe(RECIPE), tmp_path, quiet=True)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_planted_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letter").write_text(LETTER)
    cell = tmp_path / "cell"
    cell.mkdir()
    for name in ("output.txt", "lock"):
        (cell / name).symlink_to(tmp_path / "letter")
    monkeypatch.setattr(executors, "PROGRAM", "print('words')")
    process = executors.WorkerProcess({"key": "a", "folder": str(cell)}, dict(os.environ))
    process.process.wait()
    assert "words" in (cell / "output.txt").read_text()
    with pytest.raises(OSError, match="lock: could not be written"), locked(cell / "lock"):
        pass
    assert (tmp_path / "letter").read_text() == LETTER


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
def test_a_pipe_in_place_of_a_lock_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert not is_locked(tmp_path / "lock")
    with pytest.raises(OSError, match="not a file"), locked(tmp_path / "lock"):
        pass


def test_a_mark_is_found_anywhere_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for content, found in ((b"", False), (b"ar", False), (b"a mark b", True), (bytes(2**16) + b"mark", True)):
        file.write_bytes(content)
        assert holds(file, b"mark") is found
