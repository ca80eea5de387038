"""`chasm bench`: tables on the terminal, and the same in files with their provenance."""

import csv
import re
from inspect import signature
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from chasm import ops
from chasm.bench import clock, table
from chasm.cli.app import app
from chasm.cli.bench import bench

SMALL = ["--device", "cpu", "--seconds", "0.001"]


def run(*args: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *args])
    assert result.exit_code == code, result.output
    return result.output


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def test_table_and_files(tmp_path: Path) -> None:
    select = ["--shape", "1,16,8,8", "--shape", "1x16x7x9", "--mixer", "chasm", "--mixer", "gfnet", "--form", "fft"]
    text = run(*SMALL, *select, "--mode", "step", "--out", str(tmp_path / "results" / "speed"))
    assert "1x16x8x8" in text
    assert "gfnet" in text
    rows = rows_of(tmp_path / "results" / "speed.csv")
    assert [(r["shape"], r["mixer"], r["form"]) for r in rows] == [
        (shape, *row)
        for shape in ("1x16x8x8", "1x16x7x9")
        for row in (("literal", "eager"), ("chasm", "fft"), ("gfnet", "-"))
    ]
    assert all(float(r["time_ms"]) > 0 and float(r["error"]) < 1e-4 for r in rows)
    page = (tmp_path / "results" / "speed.md").read_text()
    for fact in ("device", "torch", "triton", "commit", "date", "command", "copy", "float32 matrix product"):
        assert f"- {fact}: " in page
    assert f"- torch: {torch.__version__}" in page
    assert page.count("\n| float32 | step |") == len(rows)


def test_scaling_writes_slopes_and_draws_again(tmp_path: Path) -> None:
    out, first, second = tmp_path / "s", tmp_path / "a.png", tmp_path / "b.png"
    one = ["--sweep", "size", "--mixer", "gfnet", "--device", "cpu"]
    text = run("scaling", *one, "--out", str(out), "--plot", str(first))
    assert "Slopes" in text
    page = out.with_suffix(".md").read_text()
    assert "## Slopes" in page
    assert "| size | float32 | step | gfnet | " in page
    run("scaling", "--from", str(out.with_suffix(".csv")), "--plot", str(second), "--note", "from the file")
    assert second.stat().st_size > 10_000
    assert "--plot" in run("scaling", "--from", str(out.with_suffix(".csv")), code=3)
    assert "unknown sweep" in run("scaling", "--sweep", "depth", code=3)


def test_bases_in_files(tmp_path: Path) -> None:
    assert "ours" in run("bases", "--device", "cpu", "--out", str(tmp_path / "b"))
    rows = rows_of(tmp_path / "b.csv")
    assert len(rows) == 3
    assert all(float(r["time_ms"]) > 0 for r in rows)
    assert "- device: " in (tmp_path / "b.md").read_text()


def test_mistakes_are_one_line_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(device: torch.device) -> None:
        raise AssertionError("a wrong name is refused first")

    monkeypatch.setattr(clock, "measure_limits", measured)
    monkeypatch.setattr(table, "measure_limits", measured)
    assert "8,96,256,256" in run(*SMALL, "--shape", "8,96", code=3)
    assert "did you mean 'gfnet'" in run(*SMALL, "--mixer", "gfnt", code=3)
    assert "did you mean 'gfnet'" in run("scaling", "--mixer", "gfnt", "--device", "cpu", code=3)
    assert "did you mean 'gfnet'" in run("profile", "--mixer", "gfnt", "--device", "cpu", code=3)
    assert "device 'tpu' cannot be used here" in run("--device", "tpu", code=3)
    assert "expected device cuda or cpu" in run("--device", "meta", code=3)
    assert "go after its name" in run("--dtype", "bf16", "hosts", code=3)
    assert "expected hifi or unet" in run("hosts", "--host", "vit", code=3)


def test_help_names_every_form_and_mode_and_no_other() -> None:
    told = run("--help")
    assert all(f" {name}" in told for name in table.MODES)
    listed = signature(bench).parameters["form"].default.help.removeprefix("How CHASM is computed: ").rstrip(".")
    assert re.split(", | or ", listed) == ["auto", *ops.FORMS]
