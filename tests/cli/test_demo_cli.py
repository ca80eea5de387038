"""`chasm demo`: what it compares, where it leaves the report, how it fails."""

import copy
import json

import pytest
from typer.testing import CliRunner, Result

from chasm.cli import demo as commands
from chasm.cli.app import app


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> object:
    """With fewer and smaller slices than it has."""
    tasks = copy.deepcopy(commands.TASKS)
    tasks["reconstruction"]["data"]["options"] |= {"size": 32, "cases": 10, "slices": 1}
    monkeypatch.setattr(commands, "TASKS", tasks)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(*words: str) -> Result:
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["demo", "--steps", "2", *words], catch_exceptions=False)

    return run


def test_methods_one_protocol_and_the_report(demo, tmp_path):
    said = demo("--out", str(tmp_path))
    page = tmp_path / "reconstruction" / "report.html"
    assert said.exit_code == 0
    assert f"report: {page}\n" in said.output
    runs = tmp_path / "reconstruction" / "seed0-2steps"
    trained = [runs / name for name in ("baseline", "wrapper-only", "gfnet", "chasm")]
    found = [json.loads((f / "metrics.json").read_text()) for f in (*trained, runs / "compressed-sensing")]
    assert len({json.dumps(m["task"]) for m in found}) == 1
    assert found[0]["task"]["mask"]["kind"] == "equispaced"
    assert found[0]["task"]["mask"]["nominal"] == 4
    html = page.read_text()
    assert "Made by <code>chasm demo --task reconstruction --steps 2 --seed 0</code>" in html
    for method in ("zero-filled", "compressed sensing", *commands.METHODS):
        assert f">{method}</td>" in html


def test_a_place_that_cannot_be_written_is_one_line(demo, tmp_path):
    (tmp_path / "file").touch()
    said = demo("--out", str(tmp_path / "file"))
    assert said.exit_code == 3
    (line,) = [line for line in said.stderr.splitlines() if line.startswith("error: ")]
    assert "could not be written (Not a directory)" in line
    assert said.stderr.endswith(f"{line}\n")
