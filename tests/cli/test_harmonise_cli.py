"""`chasm harmonise`: what it measures, what it leaves, how it fails."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from chasm.cli.app import app
from chasm.common.files import read_json
from chasm.studies.projection import project_run
from chasm.train import load_recipe, train
from chasm.train.run import load_run


def config(mixer: str, **options: Any) -> Any:
    return load_recipe(
        {
            "name": "small",
            "data": {"name": "embedded", "options": {"size": 16, "cases": 40, "slices": 1}},
            "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0, 1]}},
            "mixer": {"name": mixer, "options": options},
            "train": {"steps": 20, "batch": 4, "lr": 5e-3, "val_every": 20},
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of trained runs: untied and fno-d."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        train(config("chasm", basis="untied", axes="cw>ch"), root / "untied", quiet=True)
        train(config("fno-d", modes=[3, 4]), root / "fno-d", quiet=True)
    return root


@pytest.fixture
def untied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "untied", tmp_path / "untied"))


def call(*words: object, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["harmonise", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_an_untied_run_is_measured_projected_and_scored(untied: Path) -> None:
    said = call(untied).output
    assert said.count("height") == said.count("width") == 2
    assert "Paired over 8 cases" in said
    before, after = (read_json(f / "metrics.json") for f in (untied, untied / "harmonised"))
    line = next(line.split() for line in said.splitlines() if "PSNR, dB" in line)
    assert line[2:4] == [f"{m['mean']['psnr']:.2f}" for m in (before, after)]
    lost = after["mean"]["psnr"] - before["mean"]["psnr"]
    assert abs(lost) > 0.005
    assert line[4] == f"{lost:+.3f}".replace("-", "−")
    low, high = (float(v.strip("[],").replace("−", "-")) for v in line[5:7])
    assert low < lost < high


def test_the_harmonised_run_is_a_run(untied: Path, tmp_path: Path) -> None:
    record = json.loads(call(untied, "-o", tmp_path / "new", "--json").output)
    again = CliRunner().invoke(app, ["eval", str(tmp_path / "new"), "--json"])
    assert json.loads(again.stdout)["cases"] == record["projection"]["after"]
    run = load_run(tmp_path / "new")
    assert {slot.basis for slot in run.model.slots.values()} == {"shared"}
    assert run.config.mixer.options == {"axes": "cw>ch"}
    assert run.config.name == "small-harmonised"
    assert (tmp_path / "new" / "examples.npz").is_file()
    assert not (untied / "harmonised").exists()
    assert record["projection"]["difference"]["psnr"]["cases"] == 8
    assert all(h["commutator"] > 0 for axes in record["slots"].values() for h in axes.values())
    of_shared = json.loads(call(tmp_path / "new", "--json").output)
    assert of_shared["projection"] is None
    assert all(h["commutator"] < 1e-12 for axes in of_shared["slots"].values() for h in axes.values())


def test_a_second_call_writes_the_same_run(untied: Path) -> None:
    call(untied)
    before = (untied / "harmonised" / "weights.safetensors").read_bytes()
    call(untied)
    assert (untied / "harmonised" / "weights.safetensors").read_bytes() == before


def test_an_fno_is_measured_and_not_projected(trained: Path) -> None:
    said = call(trained / "fno-d").output
    assert said.count("height") == 2
    assert "nothing was projected" in said
    assert not (trained / "fno-d" / "harmonised").exists()
    with pytest.raises(ValueError, match="no slot has an untied basis"):
        project_run(load_run(trained / "fno-d"))


def test_errors_are_one_line(untied: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name, options, message in (("gfnet", {}, "got GFNet"), ("chasm", {"basis": None}, "no spectral core")):
        one = config(name, **options)
        train(one.model_copy(update={"train": one.train.model_copy(update={"steps": 1})}), tmp_path / name, quiet=True)
        assert message in one_line(call(tmp_path / name, code=3))
    assert "holds a run with another config: name" in one_line(call(untied, "-o", trained / "fno-d", code=3))
    assert "no such run folder" in one_line(call(tmp_path / "nothing", code=3))


def one_line(result: Result) -> str:
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
